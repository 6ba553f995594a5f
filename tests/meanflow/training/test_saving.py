"""How often a run saves: after epochs, steps or minutes."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from fullstride.meanflow.checkpoints.folder import checkpoints
from fullstride.meanflow.config.intervals import SaveInterval, save_interval
from fullstride.meanflow.config.overrides import compose
from fullstride.meanflow.config.presets import LOSSES
from fullstride.meanflow.config.schema import DataConfig, TrainConfig
from fullstride.meanflow.training import trainer
from fullstride.meanflow.training.build import steps_to_checkpoint
from fullstride.meanflow.training.state import Position
from tests.meanflow.checkpoints.test_start import config


def saved(run: Path) -> list[int]:
    return [int(path.name.removeprefix("step_")) for path in checkpoints(run)]


def quick(folder: Path, every: int | str, **keys) -> TrainConfig:
    """Three epochs of four steps."""
    given = {"loss": LOSSES["mse"](), "data": DataConfig(batch_size=200), "epochs": 3, "keep": 0}
    return config(folder, save_every=every, **given, **keys)


@pytest.mark.parametrize(
    ("every", "steps"), [("5steps", [5, 10, 12]), ("4 steps", [4, 8, 12]), (2, [8, 12]), ("1", [4, 8, 12]), (0, [12])]
)
def test_a_run_saves_after_so_many_epochs_or_steps_and_at_the_end(every, steps, tmp_path):
    assert saved(trainer.train(quick(tmp_path, every))) == steps


def test_a_run_saves_after_so_many_minutes_of_work(tmp_path, monkeypatch):
    minute = [0.0]

    def monotonic() -> float:
        """Every look takes forty seconds, one look for each step and one for each save."""
        minute[0] += 40
        return minute[0]

    monkeypatch.setattr(trainer, "time", SimpleNamespace(monotonic=monotonic))
    assert saved(trainer.train(quick(tmp_path, "2min"))) == [3, 6, 9, 12]


def test_the_default_saves_every_ten_minutes():
    assert save_interval(TrainConfig().save_every) == SaveInterval(minutes=10)
    assert compose(["save_every=7"]).save_every == 7
    assert save_interval(compose(["save_every=500steps"]).save_every) == SaveInterval(steps=500)
    assert save_interval("1.5min") == SaveInterval(minutes=1.5)


@pytest.mark.parametrize(
    ("every", "position", "left"),
    [
        ("5steps", (0, 0, 0), 5),
        ("5steps", (7, 1, 3), 3),
        ("5steps", (11, 2, 3), 1),
        (2, (3, 0, 3), 5),
        ("9min", (3, 0, 3), 9),
    ],
)
def test_the_next_checkpoint_is_known(every, position, left, tmp_path):
    step, epoch, batch = position
    assert steps_to_checkpoint(quick(tmp_path, every), Position(step, epoch, batch), 4) == left
