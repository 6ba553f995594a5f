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
from benchmarks.harness.code_digest import digest, digest_of
from benchmarks.report.frame import Source
from benchmarks.report.staleness import CASES, MOVES, ROOT, covers, state
from tests.benchmarks.report.made import made

RESULTS = ROOT / "benchmarks" / "results"
KERNEL, GLUE, HARNESS = (
    "fullstride/jvp/norms/row_forward.py",
    "fullstride/jvp/norms/api.py",
    "benchmarks/cases/jvp/norms.py",
)
NOW = {file: digest_of(ROOT / file) for file in (KERNEL, GLUE, HARNESS)}
STALE = NOW | {KERNEL: "another"}


def _state(code, root: Path = ROOT, moves=MOVES, case: str = "jvp-norms"):
    return state(Source("r.json", {"case": case, "environment": {"code": code}}, "result"), root, moves)


@pytest.mark.parametrize(
    ("changed", "name", "why"),
    [
        ({}, "current", "all that was loaded is what it was"),
        ({HARNESS: "x"}, "harness changed", "norms.py"),
        ({GLUE: "x", HARNESS: "x"}, "harness changed", "api.py and 1 more"),
        ({KERNEL: "x", HARNESS: "x"}, "code under test changed", "row_forward.py"),
        ({"fullstride/jvp/norms/row_gone.py": "x"}, "code under test changed", "row_gone.py"),
    ],
)
def test_a_result_has_one_of_three_states(changed, name, why):
    assert _state(NOW | changed) == (name, why)


@pytest.mark.parametrize("code", [None, {}, {HARNESS: NOW[HARNESS]}])
def test_a_result_without_digests_of_its_code_is_not_known(code):
    assert _state(code).name == "not known"
    assert _state(NOW, case="something-new") == ("not known", "no case says which code it is of")


def test_words_about_the_code_and_a_move_change_nothing(tmp_path):
    old = "from fullstride.b import (\n    c,\n)\nimport os\n\nx = c + 1\n"
    here = tmp_path / KERNEL
    here.parent.mkdir(parents=True)
    code, moves = {"fullstride/a.py": digest(old, ".py")}, {"fullstride/a.py": KERNEL}
    here.write_text('"""Words."""\n\nimport os\n\nfrom fullstride.room.b import c\n\nx = c + 1  # more\n')
    assert _state(code, tmp_path, moves).name == "current"
    here.write_text("import os\n\nx = c + 2\n")
    assert _state(code, tmp_path, moves).name == "code under test changed"


def test_what_every_case_declares_is_there_and_is_no_harness():
    files = [str(path.relative_to(ROOT)) for path in ROOT.glob("fullstride/**/*") if path.is_file()]
    patterns = {pattern for case in CASES.values() for pattern in case.get("code", [])}
    assert len(patterns) > 20
    assert [pattern for pattern in sorted(patterns) if not any(covers([pattern], file) for file in files)] == []
    assert not [pattern for pattern in patterns if pattern.startswith(("benchmarks", "fullstride/measure"))]


def test_a_case_is_declared_for_every_result_that_lies_here():
    cases = {
        Source(path.name, json.loads(path.read_text()), "result").data.get("case") for path in RESULTS.glob("*--*.json")
    }
    named = {
        case for case in cases if case and any(path.name.startswith(f"{case}--") for path in RESULTS.glob("*.json"))
    }
    with_rows = {case for case in named if "schema" in json.loads(next(RESULTS.glob(f"{case}--*.json")).read_text())}
    assert with_rows - set(CASES) == set()


def test_what_moved_is_where_the_table_says_and_nothing_else_took_its_place():
    """Check that a new file at an old path is not judged by the digests of the moved one."""
    assert len(MOVES) > 300
    assert [new for new in MOVES.values() if not (ROOT / new).is_file()] == []
    assert [old for old in MOVES if (ROOT / old).is_file()] == []


def _write(folder, name, code, command=None, machine="NVIDIA H200"):
    result = made("jvp-norms").to_dict()
    result["environment"] |= {"code": code, "command": command}
    result["environment"]["gpu"] = {"name": machine}
    (folder / f"{name}.json").write_text(json.dumps(result))


def _stale(folder, *given):
    done = CliRunner().invoke(app, ["report", "stale", "--results", str(folder), *given])
    assert done.exit_code == 0, done.output
    return done


def test_what_is_stale_is_told_with_the_command_that_measures_it_anew(tmp_path):
    _write(tmp_path, "a", STALE, "fullstride bench jvp-norms --only '3 & 4'")
    _write(tmp_path, "b", NOW, "fullstride bench other")
    _write(tmp_path, "c", STALE)
    _write(tmp_path, "d", STALE, "fullstride bench jvp-norms --only '3 & 4'")
    _write(tmp_path, "e", NOW | {HARNESS: "another"}, "fullstride bench other")
    done = _stale(tmp_path)
    why = "(NVIDIA H200, 2031-02-03): code under test changed: row_forward.py"
    assert done.stdout.splitlines() == [
        f"# a.json {why}",
        f"# d.json {why}",
        "python -m benchmarks jvp-norms --only '3 & 4'",  # by its present name
        f"# c.json {why}",
        "# its command was not recorded",
    ]
    assert done.stderr == "3 of 5 results listed, 3 of them of changed code under test\n"
    assert "# e.json" in _stale(tmp_path, "--all").stdout


def test_a_shell_runs_what_is_printed(tmp_path):
    _write(tmp_path, "a", STALE, "echo 'one  word'")
    _write(tmp_path, "b", STALE)
    done = subprocess.run(["sh"], input=_stale(tmp_path).stdout, capture_output=True, text=True, check=True)
    assert done.stdout == "one  word\n"


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("touch PATH/x", "# put folders for PATH/: touch PATH/x"),
        (
            "A=1 torchrun --nnodes=2 -m fullstride x",
            "# start it on every node, with a rendezvous: A=1 torchrun --nnodes=2",
        ),
    ],
)
def test_a_command_that_somebody_must_see_to_is_not_run(tmp_path, command, line):
    _write(tmp_path, "a", STALE, command)
    assert _stale(tmp_path).stdout.splitlines()[1].startswith(line)


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
    code = {"fullstride/meanflow/objective/loss.py": "another"}
    (tmp_path / recorded.name).write_text(json.dumps(data | {"environment": data["environment"] | {"code": code}}))
    command = _stale(tmp_path).stdout.splitlines()[1].partition("--runs: ")[2]
    words = shlex.split(command.replace("N,N", "0,1"))
    assert words[:4] == ["python", "-m", "benchmarks", "time-to-quality"]
    # The whole command line is checked, up to the trainings.
    monkeypatch.setattr(
        cli_experiment, "_trainings", lambda asked, codes, seeds, official, limit: [codes, seeds, official]
    )
    monkeypatch.setattr("benchmarks.experiments.gpu_pool.spread", lambda *given, **_: asked.extend(given) or sys.exit())
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
    """Check that the known names are quoted, because they contain commas."""
    _write(tmp_path, "a", STALE)
    _write(tmp_path, "b", STALE, machine="NVIDIA A100, one of two")
    done = CliRunner().invoke(app, ["report", "stale", "--results", str(tmp_path), "--machine", "mi300"])
    assert done.exit_code == 2
    told = "--machine mi300: no result of such a machine; expected a part of one of 'NVIDIA A100, one of two', '"
    assert told in " ".join(done.output.split())
