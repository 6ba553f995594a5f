import json
from pathlib import Path

import pytest
import torch

from fullstride.meanflow.checkpoints.folder import checkpoints, find_checkpoint, read_manifest
from fullstride.meanflow.config.schema import TrainConfig, WatchConfig
from fullstride.meanflow.training.build import limits_of, steps_to_checkpoint
from fullstride.meanflow.training.state import Position
from fullstride.meanflow.training.trainer import Trainer
from fullstride.process.watchdog import Watchdog
from fullstride.runs.early_ends import read_ends
from tests.meanflow.training.test_trainer import config


def steps_of(run: Path) -> int:
    return read_manifest(find_checkpoint(run))["position"]["step"]


@pytest.fixture(scope="module")
def troubled(forked, tmp_path_factory) -> tuple[Path, dict[str, int], str]:
    """The folder of the runs, the exit codes of their processes, what these said."""
    folder = tmp_path_factory.mktemp("stuck")
    (done,) = forked(["tests.meanflow.training.stuck_run", str(folder)])
    assert done.returncode == 0, done.stderr
    return folder, json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_a_run_whose_step_hangs_ends_and_goes_on(troubled):
    folder, codes, said = troubled
    assert (codes["asleep"], codes["again"]) == (75, 0)
    (end,) = read_ends(folder / "asleep" / "run")
    assert end["message"] == "no progress for 4 s, waiting for step 3"
    assert (end["reason"], end["step"]) == ("no_step", 2)
    assert "in _step" in said
    assert steps_of(folder / "asleep" / "run") == 6


def test_an_overdue_checkpoint_is_saved_at_the_next_step_and_the_run_goes_on(tmp_path, monkeypatch, capfd):
    trainer = Trainer(config(tmp_path, keep=0))
    overdue = property(lambda _: trainer.state.position.step == 3)
    monkeypatch.setattr(Watchdog, "checkpoint_overdue", overdue)
    run = trainer.run_to_end()
    assert [path.name for path in checkpoints(run)] == [f"step_{step:08d}" for step in (2, 3, 4, 6)]
    assert capfd.readouterr().err.count("steps became slower; saved early") == 1


def test_a_first_step_that_compiles_for_long_is_not_stuck(troubled):
    folder, codes, _ = troubled
    assert codes["first"] == 0
    assert read_ends(folder / "first" / "run") == []


def test_out_of_memory_leaves_its_line(troubled):
    folder, codes, _ = troubled
    assert codes["memory"] == 12
    (end,) = read_ends(folder / "memory" / "run")
    assert (end["reason"], end["exit_code"], end["step"]) == ("out_of_memory", 12, 2)
    assert "data.batch_size=2 gradient_accumulation_steps=151 takes less" in end["message"]


def test_a_process_that_waits_in_a_collective_for_another_one_ends_too(troubled):
    folder, codes, _ = troubled
    assert 75 in (codes["waits"], codes["sleeps"])
    # The one that ends first takes its peer out of the collective, with an error.
    assert 0 not in (codes["waits"], codes["sleeps"])
    ends = read_ends(folder / "together" / "run")
    assert ends
    assert {(end["reason"], end["step"], end["exit_code"]) for end in ends} == {("no_step", 2, 75)}


def test_the_watch_knows_what_is_done_and_how_far_the_next_checkpoint_is(tmp_path, monkeypatch):
    told: list[object] = []
    monkeypatch.setattr(Watchdog, "train", lambda _: told.append("steps"))
    monkeypatch.setattr(Watchdog, "wait_for", lambda _, what, limit: told.append((what, limit)))
    monkeypatch.setattr(Watchdog, "expect_checkpoint", lambda _, ahead: told.append(ahead))
    trainer = Trainer(config(tmp_path, save_every=2, eval_every=3))
    monkeypatch.setattr(trainer.evaluations, "_scores", dict)
    trainer.run_to_end()
    evaluation = ("an evaluation", 240.0 * 60)
    assert told == [4, ("the first step", 60.0 * 60), "steps", 2, 0, evaluation, "steps"]


@pytest.mark.parametrize(
    ("save_every", "epochs", "epoch", "batch", "ahead"),
    [
        (1, 9, 0, 0, 7),
        (1, 9, 3, 2, 5),
        (4, 9, 3, 2, 5),
        (4, 9, 4, 0, 28),
        (4, 9, 8, 1, 6),
        (0, 9, 4, 3, 32),
        (2, 9, 9, 0, 0),
    ],
)
def test_steps_to_the_next_checkpoint(save_every, epochs, epoch, batch, ahead):
    run = TrainConfig(save_every=save_every, epochs=epochs)
    assert steps_to_checkpoint(run, Position(epoch=epoch, batch=batch), 7) == ahead


def test_limits_are_minutes_and_a_cpu_has_no_idle_gpu():
    run = TrainConfig(watch=WatchConfig(step_minutes=0.5, gpu_idle_minutes=2.0, checkpoint_factor=0.0))
    limits = limits_of(run, torch.device("cuda"))
    assert (limits.step, limits.gpu_idle, limits.checkpoint_factor, limits.shown) == (30.0, 120.0, 0.0, 600.0)
    assert limits_of(run, torch.device("cpu")).gpu_idle == 0.0
