import contextlib
import itertools
import multiprocessing
import os
import signal

import numpy as np
import pytest
import torch
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from fullstride.errors import ConfigError, ReadError
from fullstride.meanflow.data.dataset import Split
from fullstride.meanflow.data.loader import Loader
from fullstride.meanflow.data.order import epoch_order, mirror_half
from tests.meanflow.data.pictures import Counting, store_of, write_folder

CPU = torch.device("cpu")
# A machine with one core starts two workers all the same.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@pytest.fixture
def load():
    """Makes loaders, and ends their workers with the test."""
    with contextlib.ExitStack() as made:
        yield lambda *args: made.enter_context(Loader(*args))


def orders(n: int, seed: int, epochs: int = 2) -> list[torch.Tensor]:
    sizes = {"steps": 3, "micro_batches": 2, "batch_size": 3}
    return [epoch_order(n, **sizes, seed=seed, epoch=epoch) for epoch in range(epochs)]


def assert_batches(got, raw: torch.Tensor, labels: torch.Tensor, chosen: torch.Tensor) -> None:
    """Batches of exactly the records `chosen`, (steps, k, b), of all `raw`."""
    for batch, step in itertools.zip_longest(got, chosen):
        assert batch.raw.dtype == raw.dtype
        assert torch.equal(batch.raw, raw[step])
        assert torch.equal(batch.labels, labels[step])


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_pictures_come_in_order_from_any_number_of_workers(load, tmp_path, seed, workers):
    raw = write_folder(tmp_path, np.random.default_rng(seed), 19)
    labels = torch.randint(0, 5, (19,))
    chosen = orders(19, seed)
    torch.manual_seed(seed)
    state = torch.get_rng_state()
    loader = load(Split(store_of(tmp_path), labels), CPU, workers)
    assert_batches(loader.batches(chosen), raw, labels, torch.cat(chosen))
    # The training's random numbers are none of the loader's.
    assert torch.equal(torch.get_rng_state(), state)


def test_records_in_memory_come_in_order(load, seed):
    raw, labels = torch.randint(0, 256, (23, 1, 3, 5), dtype=torch.uint8), torch.arange(23)
    chosen = orders(23, seed)
    assert_batches(load(Split(raw, labels), CPU).batches(iter(chosen)), raw, labels, torch.cat(chosen))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("start", [1, 2, 3])
def test_a_run_that_goes_on_sees_what_it_would_have_seen(load, seed, workers, start):
    """Also with the workers of an iteration that was left unfinished."""
    store, labels = Counting(20), torch.arange(20)
    raw, chosen = torch.stack([store[i] for i in range(20)]), orders(20, seed)
    loader = load(Split(store, labels), CPU, workers)
    next(loader.batches(chosen))
    assert_batches(loader.batches(chosen, start), raw, labels, torch.cat(chosen)[start:])
    resident = load(Split(raw, labels), CPU)
    assert_batches(resident.batches(chosen, start), raw, labels, torch.cat(chosen)[start:])


@pytest.mark.parametrize("workers", [0, 1])
def test_an_order_asks_for_mirrored_records(load, seed, workers):
    split = Split(Counting(20), torch.arange(20), flipped=Counting(20, first=1000))
    raw = torch.stack([Counting(20)[i] for i in range(20)] + [Counting(20, 1000)[i] for i in range(20)])
    chosen = mirror_half(orders(20, seed)[0], 20, seed=seed, epoch=0)
    assert (chosen >= 20).any()
    got = load(split, CPU, workers).batches([chosen])
    assert_batches(got, raw, torch.arange(20).repeat(2), chosen)


def test_epochs_are_drawn_as_they_are_needed(load, seed):
    drawn = []
    endless = (drawn.append(epoch) or orders(20, seed + epoch, 1)[0] for epoch in itertools.count())
    got = load(Split(Counting(20), torch.zeros(20, dtype=torch.long)), CPU).batches(endless)
    for _ in range(4):
        next(got)
    assert len(drawn) <= 3


@pytest.mark.parametrize("workers", [0, 2])
def test_a_damaged_file_is_one_line_from_any_process(load, tmp_path, workers):
    write_folder(tmp_path, np.random.default_rng(0), 18)
    damaged = tmp_path / "0007.png"
    damaged.write_bytes(damaged.read_bytes()[:60])
    loader = load(Split(store_of(tmp_path), torch.zeros(18, dtype=torch.long)), CPU, workers)
    with pytest.raises(ConfigError, match=r"^\S+0007.png: PIL cannot read it \(.+\); replace or delete the file$"):
        list(loader.batches(orders(18, 0)))


def test_workers_outlive_a_refused_record(load):
    split = Split(Counting(18, refused=5), torch.zeros(18, dtype=torch.long))
    loader = load(split, CPU, 2)
    whole = torch.arange(18).reshape(3, 2, 3)
    with pytest.raises(ConfigError, match="^record 5: refused$"):
        list(loader.batches([whole]))
    assert len(list(loader.batches([whole], start=1))) == 2


class Deadly(Counting):
    """Reading record 4 kills the process that does it."""

    def __getitem__(self, index):
        if index == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def test_a_worker_that_is_killed_raises(load, monkeypatch):
    # torch looks for dead workers every five seconds; here sooner.
    monkeypatch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.2,))
    split = Split(Deadly(18), torch.zeros(18, dtype=torch.long))
    with pytest.raises(ReadError, match=r"^the data's worker process [\d, ]+ has died, .*data.workers"):
        list(load(split, CPU, 2).batches([torch.arange(18).reshape(3, 2, 3)]))


class Interrupted(Counting):
    """Reading record 4 does what Control-C does."""

    def __getitem__(self, index):
        if index == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return super().__getitem__(index)


def test_control_c_is_left_to_the_main_process(load):
    split = Split(Interrupted(18), torch.zeros(18, dtype=torch.long))
    assert len(list(load(split, CPU, 1).batches([torch.arange(18).reshape(3, 2, 3)]))) == 3


@pytest.mark.parametrize("split", [Split(Counting(9), torch.arange(9)), Split(torch.zeros(9, 1), torch.arange(9))])
def test_what_is_not_there_is_refused(load, split):
    loader = load(split, CPU)
    for low, high in ((0, 9), (-1, 3)):
        with pytest.raises(ValueError, match=f"indices span {low} to {high}, expected 0 to 8"):
            next(loader.batches([torch.tensor([[[low, high]]])]))
    with pytest.raises(ValueError, match="start is 2, expected 0 to 1"):
        next(loader.batches([torch.tensor([[[1, 2]]])], start=2))


def test_fewer_than_no_workers_are_refused(load):
    with pytest.raises(ConfigError, match="data.workers=-1: expected 0"):
        load(Split(Counting(9), torch.arange(9)), CPU, -1)


def test_a_closed_loader_has_no_workers_and_may_start_again(load):
    loader = load(Split(Counting(18), torch.arange(18)), CPU, 2)
    whole = torch.arange(18).reshape(3, 2, 3)
    before = len(multiprocessing.active_children())
    for _ in range(2):
        batches = loader.batches([whole])
        assert torch.equal(next(batches).labels, whole[0])
        assert len(multiprocessing.active_children()) == before + 2
        loader.close()
        assert len(multiprocessing.active_children()) == before
