"""Transfers between processes that write into each other's memory, as threads that take turns at random."""

import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fullstride.step.torch.distributed import peer_copies as peers
from fullstride.step.torch.distributed.buckets import Bucket
from fullstride.step.torch.distributed.mean_kernel import BLOCK
from fullstride.step.torch.distributed.peer_copies import PeerCopies, SharedBuffers, mean_of
from fullstride.step.torch.distributed.processes import Processes


class Machine:
    """Memory of some threads, each of which dawdles before and behind each meeting."""

    def __init__(self, size: int):
        self.size, self.barrier = size, threading.Barrier(size, timeout=30)
        self.rows: list[list[Tensor]] = []

    def of(self, rank: int) -> Any:
        machine, count = self, 0

        class Own:
            def allocate(self, bytes_: int) -> Sequence[Tensor]:
                nonlocal count
                if rank == 0:
                    machine.rows.append([torch.zeros(bytes_, dtype=torch.uint8) for _ in range(machine.size)])
                machine.barrier.wait()
                count += 1
                return machine.rows[count - 1]

            def meet(self) -> None:
                time.sleep(random.random() * 2e-3)
                machine.barrier.wait()
                time.sleep(random.random() * 2e-3)

        return Own()


def together(size: int, act: Callable[[PeerCopies], Any]) -> list[Any]:
    """Run `act` in one thread per rank and return the results."""
    machine = Machine(size)
    with ThreadPoolExecutor(size) as pool:
        made = [PeerCopies(rank, size, machine.of(rank), torch.device("cpu")) for rank in range(size)]
        return [each.result() for each in [pool.submit(act, one) for one in made]]


def plain_mean(own: Tensor, rows: Tensor, rank: int, out: Tensor) -> None:
    parts = [own if i == rank else row for i, row in enumerate(rows)]
    out.copy_(torch.stack(parts).double().mean(0))


@pytest.fixture(autouse=True)
def _one_at_a_time(monkeypatch):
    # Triton's interpreter is none for threads.
    monkeypatch.setattr(peers, "mean_of", plain_mean)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_means_are_everyones_and_the_same_everywhere(size):
    rounds = [torch.randn(size, size * n) for n in (64, 320, 64, 7 * 64)]

    def act(one: PeerCopies) -> list[Tensor]:
        memory = [one.shared(values[0], values.shape[1]) for values in rounds]
        found = []
        for _ in range(3):
            for each, values in zip(memory, rounds, strict=True):
                each.own.copy_(values[one.rank])
            for each in memory:
                one.start_mean(each)()
            found = [each.own.clone() for each in memory]
        return found

    for own in together(size, act):
        for found, values in zip(own, rounds, strict=True):
            torch.testing.assert_close(found, values.double().mean(0).float())


@pytest.mark.parametrize("size", [2, 3])
def test_shares_and_wholes_go_on_for_many_steps(size):
    steps = torch.randn(6, 3, size, size * 128)

    def act(one: PeerCopies) -> bool:
        wholes = [one.shared(steps[0, 0, 0], size * 128) for _ in range(3)]
        good = True
        for given in steps:
            mean = [torch.full((128,), torch.nan) for _ in given]
            for values, own in zip(given, mean, strict=True):
                one.start_share(values[one.rank].clone(), own)()
            for whole, own in zip(wholes, mean, strict=True):
                whole.part(one.rank, one.rank).copy_(own)
            one.start_whole(wholes)()
            expected = given.double().mean(1).float()
            good &= all(torch.allclose(w.own, e) for w, e in zip(wholes, expected, strict=True))
        return good

    assert together(size, act) == [True] * size


def test_memory_is_of_its_dtype_and_counted():
    def act(one: PeerCopies) -> tuple[Any, ...]:
        own = one.shared(torch.zeros(1, dtype=torch.bfloat16), 2 * 96)
        before = one.bytes
        more = one.shared(torch.zeros(1), 2 * 32)  # the inboxes are large enough
        return own.own.dtype, own.own.shape, before, one.bytes - before, more.own.nbytes

    # Two inboxes of two rows, each a multiple of 256 bytes.
    assert together(2, act) == [(torch.bfloat16, (192,), 384 + 2 * 512, 256, 256)] * 2


class Threads(Processes):
    """Processes whose transfers are those of threads."""

    def __init__(self, one: PeerCopies):
        super().__init__(peers=one)
        self.rank, self.size = one.rank, one.size


def test_a_bucket_leaves_means_in_the_parameters():
    gradients = [[torch.randn(5, 3), torch.randn(7)] for _ in range(2)]

    def act(one: PeerCopies) -> list[Tensor]:
        processes = Threads(one)
        bucket = Bucket([nn.Parameter(torch.zeros(5, 3)), nn.Parameter(torch.zeros(7))], processes)
        for _ in range(2):
            bucket.send(gradients[one.rank], processes)
            bucket.receive()
        return [p.grad.clone() for p in bucket.parameters if p.grad is not None]

    for found in together(2, act):
        for i, each in enumerate(found):
            torch.testing.assert_close(each, (gradients[0][i] + gradients[1][i]) / 2)


def test_shared_memory_knows_whose_part_is_where():
    every = tuple(torch.arange(6.0) + 10 * i for i in range(3))
    shared = SharedBuffers(every[1], every)
    assert shared.part(2, 1).tolist() == [22.0, 23.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("count", "rank", "size"), [(7, 0, 2), (BLOCK + 3, 2, 3), (2 * BLOCK, 1, 4)])
def test_the_mean_of_rows_one_of_which_stands_elsewhere(dtype, count, rank, size):
    rows = torch.randn(size, count + 5).to(dtype)
    own, out = torch.randn(count).to(dtype), torch.full((count + 1,), torch.nan, dtype=dtype)
    expected = rows[:, :count].clone()
    expected[rank] = own
    rows[rank] = torch.nan
    mean_of(own, rows[:, :count], rank, out[:count])
    torch.testing.assert_close(out[:count], expected.double().mean(0).to(dtype))
    assert out[count].isnan()
