import re

import pytest
import typer
from typer.testing import CliRunner

from fullstride.cli import meanflow_sweep as multirun
from fullstride.cli.app import app
from fullstride.cli.meanflow_sweep import run_all
from fullstride.meanflow.training.trainer import train
from fullstride.runs.survey import summary

TINY = ["model=unet_tiny", "model.channels=4", "data.batch_size=449", "epochs=1", "device=cpu"]


def test_a_run_that_fails_does_not_take_the_others_along(tmp_path, monkeypatch, capsys):
    def full_once(config):
        if config.run_name == "a":
            raise OSError(28, "No space left on device")
        return train(config)

    monkeypatch.setattr(multirun, "train", full_once)
    with pytest.raises(typer.Exit) as ended:
        run_all([[*TINY, f"output_dir={tmp_path}", f"run_name={name}"] for name in "ab"])
    assert ended.value.exit_code == 1
    captured = capsys.readouterr()
    assert "a: [Errno 28] No space left on device" in captured.err
    assert "failed" in captured.out
    assert (tmp_path / "b" / "checkpoints" / "step_00000002").is_dir()


def test_a_worker_that_dies_does_not_take_the_other_runs_along(tmp_path, monkeypatch, capsys):
    """And what a run's last step left that is no number has a place in the table, and a name in brackets its own."""

    def dying(config):
        if config.run_name == "[b]":
            raise RuntimeError("DataLoader worker (pid 1) is killed by signal")
        run = tmp_path / config.run_name
        run.mkdir()
        (run / "metrics.jsonl").write_text('{"step": 3, "squared_error": null}\n')
        return run

    monkeypatch.setattr(multirun, "train", dying)
    with pytest.raises(typer.Exit):
        run_all([[*TINY, f"output_dir={tmp_path}", f"run_name={name}"] for name in ("[b]", "[a]")])
    captured = capsys.readouterr()
    assert "[b]: DataLoader worker (pid 1) is killed by signal" in captured.err
    failed, ended = (line.split() for line in captured.out.splitlines() if line.strip().startswith("["))
    assert failed == ["[b]", "failed"]
    assert ended == ["[a]", "3", "not", "finite"]


@pytest.mark.parametrize(
    ("last", "why"),
    [("null", "its last squared error is not finite"), ("1e9", "squared error is 1e[+]09"), ("0.7", None)],
)
def test_a_run_that_diverged_is_no_success(tmp_path, monkeypatch, capsys, last, why):
    def ends(config):
        run = tmp_path / config.run_name
        run.mkdir()
        (run / "metrics.jsonl").write_text(f'{{"step": 3, "squared_error": {last}}}\n')
        return run

    monkeypatch.setattr(multirun, "train", ends)
    if why is None:
        run_all([[*TINY, f"output_dir={tmp_path}", "run_name=a"]])
        return
    with pytest.raises(typer.Exit) as ended:
        run_all([[*TINY, f"output_dir={tmp_path}", "run_name=a"]])
    assert ended.value.exit_code == 1
    assert re.search(f"a: diverged: .*{why}", capsys.readouterr().err)


def test_a_run_whose_last_steps_were_skipped_has_diverged(tmp_path, monkeypatch, capsys):
    """With a rate at which weights overflow every later step is skipped, and the run comes to its end all the same."""
    wild = ["optimizer.lr=1e30", "epochs=3", "guard.check_tangents=false", f"output_dir={tmp_path}", "run_name=wild"]
    words = [*TINY[:-2], "device=cpu", *wild]
    single = CliRunner().invoke(app, ["meanflow", "train", *words])
    assert single.exit_code == 1
    assert re.search(r"^error: .*wild diverged: its last \d+ steps were not finite; lower", single.output, re.MULTILINE)
    kept = summary(tmp_path / "wild")
    assert (kept.state, kept.exit_code) == ("failed", 1)
    assert re.fullmatch(r"its last \d+ steps were not finite", kept.why)
    monkeypatch.setattr(multirun, "train", lambda _: tmp_path / "wild")
    with pytest.raises(typer.Exit):
        run_all([words])
    assert "wild: diverged" in capsys.readouterr().err
