import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fullstride.cli.app import app
from fullstride.meanflow.config.schema import TrainConfig
from fullstride.runs.folder import write_config


def invoke(*args: str):
    return CliRunner().invoke(app, ["bert", *args])


@pytest.mark.parametrize("command", ["train", "fill", "evaluate", "export"])
def test_every_command_explains_itself(command):
    result = invoke(command, "--help")
    assert result.exit_code == 0
    assert "Usage" in result.stdout


def test_the_help_of_train_says_what_an_unknown_key_is_answered_with():
    told = " ".join(invoke("train", "--help").stdout.split())
    assert "For an unknown key the nearest one is suggested." in told
    assert "device=cpu|gpu; cuda is gpu." in told


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["train", "model=tinny"], "error: model.size=tinny: expected one of tiny"),
        (["train", "step=3"], "error: step=3: no such key; did you mean steps"),
        (["fill", "a [MASK]"], "error: fill: expected either --run FOLDER or --weights FOLDER"),
        (["fill", "a [MASK]", "--run", "none"], "error: none: no run and no weights"),
        (["evaluate", "none"], "error: none: no run and no weights"),
        (["export", "none", "there"], "error: none: no run and no weights"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(args, message):
    result = invoke(*args)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith(message)


@pytest.mark.parametrize(
    "args",
    [
        ["evaluate", "runs/a"],
        ["fill", "a [MASK]", "--run", "runs/a"],
        ["export", "runs/a", "there"],
        ["train", "run_name=a", "resume=true"],
    ],
)
def test_a_run_of_meanflow_is_named_as_one(tmp_path, monkeypatch, args):
    monkeypatch.chdir(tmp_path)
    Path("runs/a").mkdir(parents=True)
    write_config(Path("runs/a"), TrainConfig(run_name="a"))
    result = invoke(*args)
    assert result.exit_code == 2
    message = "error: runs/a is a MeanFlow run, not a BERT run; expected another folder or run_name"
    assert result.stderr.splitlines() == [message]


def test_the_command_line_starts_without_jax_and_torch():
    code = (
        "import sys, fullstride.cli.app; sys.exit(bool({'jax', 'torch', 'equinox', 'tokenizers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
