import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.cli import experiments as cli_experiment
from benchmarks.cli.app import app
from benchmarks.experiments.meanflow.race_asked import CODES, SHORT, VARIANTS
from benchmarks.report.history import PACKAGE
from fullstride.measure.code_digest import digest
from tests.benchmarks.report.made import made, write_all

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
THERE = "fullstride/errors.py"
CURRENT = {THERE: digest((PACKAGE / "errors.py").read_text(), ".py")}
STALE = {THERE: "another"}


def _write(folder, name, code, command=None, machine="NVIDIA H200"):
    result = made("something-new").to_dict()
    result["environment"] |= {"code": code, "command": command}
    result["environment"]["gpu"] = {"name": machine}
    (folder / f"{name}.json").write_text(json.dumps(result))


def _stale(folder, *given):
    done = CliRunner().invoke(app, ["report", "stale", "--results", str(folder), *given])
    assert done.exit_code == 0, done.output
    return done


def test_what_is_not_current_is_told_with_the_command_that_measures_it_anew(tmp_path):
    _write(tmp_path, "a", STALE, "fullstride bench llm --only '3 & 4'")
    _write(tmp_path, "b", CURRENT, "fullstride bench other")
    _write(tmp_path, "c", STALE)
    _write(tmp_path, "d", STALE, "fullstride bench llm --only '3 & 4'")
    done = _stale(tmp_path)
    why = "(NVIDIA H200, 2031-02-03): stale: the code of errors.py is another one now"
    assert done.stdout.splitlines() == [
        f"# a.json {why}",
        f"# d.json {why}",
        "python -m benchmarks llm --only '3 & 4'",  # by its present name
        f"# c.json {why}",
        "# its command was not recorded",
    ]
    assert done.stderr == "3 of 4 are not known to be current\n"


def test_a_shell_runs_what_is_printed(tmp_path):
    _write(tmp_path, "a", STALE, "echo 'one  word'")
    _write(tmp_path, "b", STALE)
    done = subprocess.run(["sh"], input=_stale(tmp_path).stdout, capture_output=True, text=True, check=True)
    assert done.stdout == "one  word\n"


def test_a_command_that_lacks_its_folders_is_not_run(tmp_path):
    _write(tmp_path, "a", STALE, "touch PATH/x")
    assert _stale(tmp_path).stdout.splitlines()[1] == "# put folders for PATH/: touch PATH/x"


def test_a_command_of_several_machines_is_not_run_on_one(tmp_path):
    _write(tmp_path, "a", STALE, "A=1 torchrun --nnodes=2 --nproc-per-node=4 -m fullstride x")
    assert _stale(tmp_path).stdout.splitlines()[1].startswith("# start it on every node, with a rendezvous: A=1 torch")


@pytest.mark.parametrize(
    ("name", "trained", "folder"),
    [
        ("time-to-quality", (*CODES, *VARIANTS), "benchmarks/records"),
        ("time-to-quality-annealed", (*CODES, *VARIANTS, SHORT), "benchmarks/records/annealed"),
    ],
)
def test_a_race_is_run_anew_and_not_gathered(name, trained, folder, tmp_path, monkeypatch):
    (recorded,) = (path for path in RESULTS.glob(f"*-{name}--*") if " --collect " in path.read_text())
    asked, data = [], json.loads(recorded.read_text())
    (tmp_path / recorded.name).write_text(json.dumps(data | {"environment": data["environment"] | {"code": STALE}}))
    command = _stale(tmp_path).stdout.splitlines()[1].partition("--runs: ")[2]
    words = shlex.split(command.replace("N,N", "0,1"))
    assert words[:4] == ["python", "-m", "benchmarks", "time-to-quality"]
    # Of the command line everything is checked, up to the trainings.
    monkeypatch.setattr(
        cli_experiment, "_trainings", lambda asked, codes, seeds, official, limit: [codes, seeds, official]
    )
    monkeypatch.setattr(cli_experiment, "spread", lambda *given, **_: asked.extend(given) or sys.exit())
    done = CliRunner().invoke(app, words[3:])
    assert done.exit_code == 0, done.output
    gpus, (codes, seeds, official), runs, collect, _ = asked
    assert (gpus, codes, seeds, collect) == ("0,1", trained, (0, 1, 2), False)
    assert (str(official), str(runs)) == ("PATH/py-meanflow", folder)


@pytest.mark.parametrize(("machine", "files"), [("h200", ["a"]), ("A100", ["b"])])
def test_machines_can_be_chosen(tmp_path, machine, files):
    _write(tmp_path, "a", STALE)
    _write(tmp_path, "b", STALE, machine="NVIDIA A100")
    told = [line.split()[1] for line in _stale(tmp_path, "--machine", machine).stdout.splitlines() if ".json" in line]
    assert told == [f"{file}.json" for file in files]


def test_a_machine_without_results_is_refused(tmp_path):
    """The names that there are, each told from the next: they have commas."""
    _write(tmp_path, "a", STALE)
    _write(tmp_path, "b", STALE, machine="NVIDIA A100, one of two")
    done = CliRunner().invoke(app, ["report", "stale", "--results", str(tmp_path), "--machine", "mi300"])
    assert done.exit_code == 2
    told = "--machine mi300: no result of one; expected a part of one of 'NVIDIA A100, one of two', 'NVIDIA H200'"
    assert told in " ".join(done.output.split())


def test_every_kind_of_file_is_judged(tmp_path):
    write_all(tmp_path, commit=None)
    _write(tmp_path, "other", STALE)
    (tmp_path / "table.json").write_text(json.dumps({"environment": {"code": STALE}, "rows": [{"ms": 1.0}]}))
    (tmp_path / "experiment.json").write_text(
        json.dumps(
            dict.fromkeys(("experiment", "title", "about", "scale", "device"), "x")
            | {key: [] for key in ("parts", "claims", "missing")}
            | {
                "format": 1,
                "conditions": {},
                "curves": [],
                "environment": {"code": STALE, "command": "fullstride x --collect"},
            }
        )
    )
    out = _stale(tmp_path).stdout
    assert all(f"# {file.name} " in out for file in tmp_path.glob("*.json"))
    assert "again, so remove that, or give other --runs: fullstride x\n" in out


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        (["page", "--machine", "h200"], "stale"),
        (["stale", "--check"], "readme"),
        (["readme", "--out", "elsewhere"], "page"),
    ],
)
def test_an_option_of_another_kind_is_refused(tmp_path, given, kind):
    done = CliRunner().invoke(app, ["report", *given, "--results", str(tmp_path)])
    assert done.exit_code == 2
    assert f"goes with `report {kind}` alone" in done.output


def test_results_beside_runs_are_refused(tmp_path):
    done = CliRunner().invoke(app, ["report", "--runs", str(tmp_path), "--results", str(tmp_path)])
    assert done.exit_code == 2
    assert "--results goes without --runs" in done.output
