import pytest
from typer.testing import CliRunner

from benchmarks.cli.app import app


def _asked(monkeypatch, *arguments):
    asked = []
    monkeypatch.setattr(
        "benchmarks.cases.step_jax.train_step.run", lambda options, network, out: asked.append((options, network, out))
    )
    result = CliRunner().invoke(app, ["train-step", *arguments])
    return result, asked


def test_what_is_asked_for_is_run(monkeypatch, tmp_path):
    arguments = [
        "--section",
        "all",
        "--model",
        "tiny",
        "--mode",
        "dropout",
        "--only",
        "TrainStep",
        "--out",
        str(tmp_path),
    ]
    result, ((options, network, out),) = _asked(monkeypatch, *arguments, "--batch-size", "3", "--length", "20")
    assert result.exit_code == 0
    assert options.sections == ("host", "leaves", "static", "law", "saving", "nnx", "step")
    assert (options.model, options.modes, options.only, out) == ("tiny", ("dropout",), ("TrainStep",), tmp_path)
    workload = network(options, "dropout")
    assert workload.batch.tokens.shape == (3, 20)


def test_the_host_is_measured_unless_told(monkeypatch):
    _, ((options, _, out),) = _asked(monkeypatch)
    assert (options.sections, options.model, options.modes) == (("host",), "base", ("sdpa", "dropout"))
    assert out.name == "results"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--section", "hosts"), "error: --section=hosts: expected one of"),
        (("--model", "huge"), "error: --model=huge: expected one of"),
        (("--precision", "tf32"), "error: --precision=tf32: expected one of"),
        (("--profile", "traces"), "error: --profile traces: only the real step can be traced; received --section host"),
    ],
)
def test_names_that_are_not_end_in_one_line(monkeypatch, arguments, message):
    result, asked = _asked(monkeypatch, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert not asked
