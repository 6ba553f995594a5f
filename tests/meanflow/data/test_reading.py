"""Runs whose data cannot be read: for a moment, for longer, or since they are damaged."""

import errno
import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter
from typer.testing import CliRunner

from fullstride.cli.app import app
from fullstride.errors import ConfigError, ReadError
from fullstride.launch.attempts import Outcome
from fullstride.meanflow.checkpoints.folder import find_checkpoint, read_group
from fullstride.meanflow.config.networks import UNetConfig
from fullstride.meanflow.config.schema import DataConfig, GuardConfig, TrainConfig
from fullstride.meanflow.data import reading
from fullstride.meanflow.data.reader import StepReader, _from_living
from fullstride.meanflow.data.reading import read_again
from fullstride.meanflow.data.sources import image_folder
from fullstride.meanflow.data.sources.image_files import ImageFiles
from fullstride.meanflow.training.trainer import Trainer, train
from fullstride.process import exit_codes
from tests.meanflow.data.pictures import write_folder, write_picture

STEPS = 5


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    monkeypatch.setattr(reading, "WAITS", (0.001, 0.002))


@pytest.fixture
def folder(tmp_path):
    """Pictures for five steps of four, and a share held out."""
    write_folder(tmp_path / "data", np.random.default_rng(0), 23, (8, 8))
    return tmp_path / "data"


def config(folder, **kwargs: Any) -> TrainConfig:
    given: dict[str, Any] = {"workers": 0} | kwargs.pop("data", {})
    return TrainConfig(
        data=DataConfig(name="image_folder", path=str(folder), batch_size=4, **given),
        model=UNetConfig(channels=4, channel_mult=[1], num_blocks=1, attention_resolutions=[]),
        guard=GuardConfig(check_tangents=False, check_step=False),
        epochs=kwargs.pop("epochs", 1),
        device="cpu",
        output_dir=str(folder.parent),
        **kwargs,
    )


def weights(run):
    return {name: read_group(find_checkpoint(run), name) for name in ("model", "optimizer", "ema_0.9999")}


def read_at(trainer: Trainer, step: int):
    """The file of the first picture of a step."""
    order = next(iter(orders_of(trainer)))
    store = trainer.data.train.records
    assert isinstance(store, ImageFiles)
    return Path(store.origin(int(order[step].flatten()[0])))


def orders_of(trainer: Trainer):
    from fullstride.meanflow.data.order import epoch_orders

    return epoch_orders(
        trainer.config, trainer.data.train, trainer.steps, trainer.state.position.epoch, 0, trainer.processes
    )


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOENT])
def test_a_disk_that_is_away_for_a_moment_costs_nothing(number, capfd):
    tries = []

    def read():
        tries.append(len(tries))
        if len(tries) < 3:
            raise OSError(number, os.strerror(number))
        return "read"

    assert read_again(read, lambda: "picture") == "read"
    assert len(tries) == 3
    assert capfd.readouterr().err.count("picture: cannot be read") == 1


@pytest.mark.parametrize(("number", "tried"), [(errno.EIO, 3), (errno.ENOENT, 3), (errno.EACCES, 1), (errno.EISDIR, 1)])
def test_what_time_does_not_change_is_not_tried_again(number, tried):
    tries = []

    def read():
        tries.append(None)
        raise OSError(number, os.strerror(number))

    with pytest.raises(ReadError, match=rf"^picture: cannot be read.*{os.strerror(number)}"):
        read_again(read, lambda: "picture")  # pyright: ignore[reportArgumentType]
    assert len(tries) == tried


def test_damage_is_no_disk_that_is_away(folder):
    trainer = Trainer(config(folder))
    file = read_at(trainer, 0)
    file.write_bytes(file.read_bytes()[:50])
    with pytest.raises(ConfigError, match="PIL cannot read it"):
        trainer.data.train.read(torch.arange(len(trainer.data.train)))


def test_a_file_that_is_gone_costs_no_step_and_the_run_goes_on_exactly(folder):
    straight = weights(train(config(folder, run_name="straight")))
    trainer = Trainer(config(folder))
    file = read_at(trainer, 3)
    file.rename(away := folder.parent / "away.png")
    with pytest.raises(
        ReadError, match=rf"{file.name}: cannot be read.*saved \S+step_00000003; to continue, .*resume=true"
    ):
        trainer.run_to_end()
    (end,) = [json.loads(line) for line in (trainer.run / "ends.jsonl").read_text().splitlines()]
    assert (end["reason"], end["step"], end["exit_code"]) == ("read_error", 3, exit_codes.UNREAD)
    away.rename(file)
    resumed = weights(train(config(folder, resume=True)))
    torch.testing.assert_close(resumed, straight, rtol=0, atol=0)


def test_the_exit_code_is_one_that_launch_starts_again(folder, monkeypatch):
    read, tries = ImageFiles.__getitem__, []

    def stale_from_the_third_step_on(self, index):
        tries.append(index)
        if len(tries) > 2 * 4:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return read(self, index)

    monkeypatch.setattr(ImageFiles, "__getitem__", stale_from_the_third_step_on)
    words = [f"data.path={folder}", "data=image_folder", "model=unet_tiny", "data.batch_size=4", "data.workers=0"]
    words += ["device=cpu", "epochs=1", f"output_dir={folder.parent}", "run_name=other", "guard.check_tangents=false"]
    done = CliRunner().invoke(app, ["meanflow", "train", *words])
    assert done.exit_code == exit_codes.UNREAD == 74, done.output
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert Outcome(done.exit_code, "").again
    assert find_checkpoint(folder.parent / "other").name == "step_00000002"


def test_a_damaged_picture_in_the_middle_costs_no_step(folder):
    trainer = Trainer(config(folder))
    file = read_at(trainer, 2)
    whole = file.read_bytes()
    file.write_bytes(whole[:60])
    with pytest.raises(ConfigError, match=rf"{file.name}: PIL cannot read it.*saved \S+step_00000002; to continue"):
        trainer.run_to_end()
    file.write_bytes(whole)
    assert find_checkpoint(train(config(folder, resume=True))).name == f"step_0000000{STEPS}"


class Deadly(ImageFiles):
    """Reading an empty file kills the worker that does it."""

    def __getitem__(self, index):
        if Path(self.origin(index)).stat().st_size == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


class Forbidden(ImageFiles):
    """An empty file may not be read."""

    def __getitem__(self, index):
        if Path(self.origin(index)).stat().st_size == 0:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return super().__getitem__(index)


@pytest.mark.parametrize(
    ("store", "said"),
    [
        (Deadly, r"(the data's worker process \d+|a worker process of the data) has died, "),
        (Forbidden, r"\S+png: cannot be read \(.*denied\)"),
    ],
)
def test_what_befalls_a_worker_is_a_line_and_costs_no_step(folder, monkeypatch, store, said):
    monkeypatch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.2,))
    monkeypatch.setattr(image_folder, "ImageFiles", store)
    trainer = Trainer(config(folder, data={"workers": 1}))
    read_at(trainer, 3).write_bytes(b"")
    with pytest.raises(ReadError, match=rf"^{said}.*saved \S+step_0000000[123];") as caught:
        trainer.run_to_end()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("error", [ConnectionRefusedError(errno.ECONNREFUSED, "refused"), EOFError()])
def test_a_worker_that_dies_as_it_hands_over_a_step_is_a_line(error):
    """Its pictures are in shared memory, which it hands over by a socket of its own."""

    def steps():
        yield 1
        raise error

    living = _from_living(steps(), 1)
    assert next(living) == 1
    with pytest.raises(ReadError, match=r"^a worker process of the data has died, .*data.workers"):
        next(living)


class Truncated(torch.utils.data.Dataset):
    """A store whose file ends too soon, as a compressed one does."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        raise EOFError("the file ends before its end-of-stream marker")


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_a_store_is_not_taken_for_a_dead_worker(workers):
    reader = StepReader([Truncated()], workers, pinned=False)
    with pytest.raises(EOFError, match="end-of-stream"):
        next(reader.read(iter([torch.arange(4).reshape(1, 1, 4)])))
    reader.close()


def test_the_end_of_a_run_reads_nothing_more(folder):
    """A picture that only a next epoch would have read keeps no run from its end."""
    trainer = Trainer(config(folder))
    order = next(iter(orders_of(trainer)))
    store = trainer.data.train.records
    assert isinstance(store, ImageFiles)
    unused = set(range(len(store))) - set(order.flatten().tolist())
    for index in unused:
        Path(store.origin(index)).write_bytes(b"")
    assert find_checkpoint(trainer.run_to_end()).name == f"step_0000000{STEPS}"


def test_a_grey_picture_of_another_kind_is_still_refused(folder):
    write_picture(folder / "0000.png", np.random.default_rng(1), (9, 9))
    with pytest.raises(ConfigError, match="expected the same"):
        train(config(folder))
