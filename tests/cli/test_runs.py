import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fullstride.bert.training.settings import OptimizerSettings, TrainSettings
from fullstride.cli.app import app
from fullstride.runs.folder import write_config
from tests.runs.test_survey import Held, end, run_at


def fullstride(*words: str | Path) -> str:
    done = CliRunner().invoke(app, ["runs", *map(str, words)])
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture
def runs(tmp_path) -> Path:
    """Three runs: one that finished, one that failed and one of an earlier version."""
    end(run_at(tmp_path / "done", step=1234))
    end(run_at(tmp_path / "failed"), FloatingPointError("the loss is not finite"))
    run_at(tmp_path / "old")
    return tmp_path


def test_list_has_a_line_for_each_run(runs):
    head, *lines = fullstride("list", runs).splitlines()
    assert head.split()[:5] == ["run", "kind", "state", "step", "loss"]
    assert lines[0].split()[:5] == [str(runs / "done"), "bert", "finished", "1,234/9", "0.25"]
    assert lines[1].split()[1:5] == ["bert", "failed", "(1)", "7/9"]
    assert lines[1].endswith("the loss is not finite")
    assert lines[2].split()[2:4] == ["unknown", "7"]
    assert [run["state"] for run in json.loads(fullstride("list", runs, "--json"))] == ["finished", "failed", "unknown"]
    assert fullstride("list", runs / "done").count("\n") == 2
    empty = runs / "empty"
    empty.mkdir()
    assert fullstride("list", empty) == "no runs\n"


def test_show_has_the_last_numbers(runs):
    told = fullstride("show", runs / "failed")
    assert [line.split()[-1] for line in told.splitlines() if line.split()[0] in ("lr", "masked_loss")] == ["0.5", "2"]
    assert "the loss is not finite" in told
    assert json.loads(fullstride("show", runs / "failed", "--json"))["exit_code"] == 1
    refused = CliRunner().invoke(app, ["runs", "show", str(runs)])
    assert refused.exit_code == 2
    assert "no run; expected a folder that" in refused.output


def test_compare_has_the_settings_that_differ(runs):
    write_config(runs / "old", TrainSettings(run_name="old", optimizer=OptimizerSettings(lr=0.125)))
    rows = {
        line.split()[0]: line.split()[1:] for line in fullstride("compare", runs / "done", runs / "old").splitlines()
    }
    assert rows["optimizer.lr"] == ["0.002", "0.125"]
    assert rows["state"] == ["finished", "unknown"]
    assert rows["step"] == ["1234", "7"]
    assert not {"optimizer.beta1", "run_name", "seed"} & rows.keys()
    both = json.loads(fullstride("compare", runs / "done", runs / "old", "--json"))
    assert both["settings"] == {"optimizer.lr": {str(runs / "done"): 0.002, str(runs / "old"): 0.125}}


def test_clean_removes_what_it_showed_only_with_yes_and_never_a_running_run(runs):
    told = fullstride("clean", runs, "--state", "failed")
    assert "these 1 runs" in told
    assert str(runs / "failed") in told
    assert str(runs / "done") not in told
    assert (runs / "failed").exists()
    assert fullstride("clean", runs, "--older-than", "1") == "nothing to remove\n"
    with Held(runs / "done"):
        assert "1 running, which are left alone" in fullstride("clean", runs, "--yes")
    assert [path.name for path in runs.iterdir()] == ["done"]
    refused = CliRunner().invoke(app, ["runs", "clean", str(runs), "--state", "running"])
    assert refused.exit_code == 2
