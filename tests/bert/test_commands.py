import subprocess
import sys

import pytest
from typer.testing import CliRunner

from fullstride.cli import app


def invoke(*args: str):
    return CliRunner().invoke(app, ["bert", *args])


@pytest.mark.parametrize("command", ["train", "fill", "evaluate", "export"])
def test_every_command_explains_itself(command):
    result = invoke(command, "--help")
    assert result.exit_code == 0
    assert "Usage" in result.stdout


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


def test_the_command_line_starts_without_jax_and_torch():
    code = "import sys, fullstride.cli; sys.exit(bool({'jax', 'torch', 'equinox', 'tokenizers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
