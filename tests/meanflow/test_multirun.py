import pytest
import typer

from fullstride.meanflow import multirun
from fullstride.meanflow.multirun import run_all
from fullstride.meanflow.trainer import train

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
