"""Rounds of means by copies between GPUs with random delays; torchrun runs one process per GPU.

Each round has new numbers, and each process draws those of all: what is read or overwritten too early shows as another
round's. Nothing waits for the device before the last round, so that hosts run ahead of it as far as in training.
"""

import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness.budget import one_stream
from fullstride.device.cuda_graph import CudaGraph
from fullstride.step.torch import Processes, join_processes
from fullstride.step.torch.distributed.buckets import Bucket
from fullstride.step.torch.distributed.join import of_ranks
from fullstride.step.torch.distributed.shards import Shard
from fullstride.step.torch.distributed.transfer import EngineCopies

ROUNDS, RECORDS = 400, 4
# Of an odd number of buckets: a record begins with the inbox that its last replay ended with.
SIZES = (1, 4_097, 262_147, 63, 1_000_003, 70_001, 129)
CLOCKS, SECONDS = 400_000, 2e-3  # the longest pauses of a GPU and of a host
DEVICE = torch.device("cuda")


class Delays:
    """Random delays of this process's GPU, in the current stream, and of its host."""

    def __init__(self, seed: int):
        self._draw = random.Random(seed)

    def __call__(self) -> None:
        if self._draw.random() < 0.3:
            torch.cuda._sleep(self._draw.randrange(1, CLOCKS))
        if self._draw.random() < 0.1:
            time.sleep(self._draw.random() * SECONDS)


class DelayedMemory:
    """Symmetric memory with delays before and after each barrier."""

    def __init__(self, memory: Any, delay: Delays):
        self._memory, self._delay = memory, delay

    def allocate(self, count: int) -> Sequence[Tensor]:
        return self._memory.allocate(count)

    def meet(self) -> None:
        self._delay()
        self._memory.meet()
        self._delay()


class Numbers:
    """Numbers of every process, with a generator for each."""

    def __init__(self, processes: Processes):
        self._rank = processes.rank
        self._generators = [torch.Generator(DEVICE).manual_seed(rank) for rank in range(processes.size)]

    def draw(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the process's own numbers for each bucket, and the means."""
        draw = lambda g: [torch.randn(size, generator=g, device=DEVICE) for size in SIZES]  # noqa: E731
        every = [draw(g) for g in self._generators]
        return every[self._rank], [torch.stack(each).double().mean(0).float() for each in zip(*every, strict=True)]


class Means:
    """Gradients that become means, as with distributed=ddp."""

    def __init__(self, processes: Processes):
        self._processes = processes
        self._buckets = [Bucket([nn.Parameter(torch.zeros(n, device=DEVICE))], processes) for n in SIZES]

    def start(self, bucket: int, values: Tensor) -> None:
        self._buckets[bucket].send([values], self._processes)

    def end(self) -> list[Tensor]:
        for bucket in self._buckets:
            bucket.receive()
        return [p.grad for bucket in self._buckets for p in bucket.parameters if p.grad is not None]


class Parts:
    """Weights of which each process replaces a part by the mean, as with distributed=fsdp."""

    def __init__(self, processes: Processes):
        self._processes = processes
        self._shards = [Shard([nn.Parameter(torch.zeros(n, device=DEVICE))], processes) for n in SIZES]

    def start(self, bucket: int, values: Tensor) -> None:
        self._shards[bucket].send([values], self._processes)

    def end(self) -> list[Tensor]:
        for shard in self._shards:
            shard.receive()
            assert shard.own.grad is not None
            shard.own.detach().copy_(shard.own.grad)
        self._processes.transfer.start_wholes([(s.own.detach(), s.memory or s.whole) for s in self._shards])()
        return [p.detach() for shard in self._shards for p in shard.parameters]


def one_round(how: Means | Parts, given: list[Tensor], expected: list[Tensor], delay: Delays) -> Tensor:
    """The largest error of all buckets, on the device."""
    delay()
    for bucket, values in enumerate(given):
        how.start(bucket, values)
        delay()
    found = how.end()
    delay()
    error = torch.stack([(a - b).abs().max() for a, b in zip(found, expected, strict=True)]).max()
    delay()
    return error


def eager(how: Means | Parts, numbers: Numbers, delay: Delays) -> Tensor:
    """Errors of rounds in eager mode."""
    return torch.stack([one_round(how, *numbers.draw(), delay) for _ in range(ROUNDS)])


def replayed(how: Means | Parts, numbers: Numbers, delay: Delays, record: Callable[..., Any] = CudaGraph) -> Tensor:
    """Errors of rounds that were captured several times, each with its own delays, between some eager ones."""
    given, expected = numbers.draw()
    records = [record(lambda: one_round(how, given, expected, delay), None) for _ in range(RECORDS)]
    order, errors = random.Random(0), []  # the same on every process
    for _ in range(ROUNDS):
        for olds, news in zip((given, expected), numbers.draw(), strict=True):
            torch._foreach_copy_(olds, news)
        delay()
        errors.append(order.choice(records).replay().clone())
        delay()
        if order.random() < 0.1:
            errors.append(one_round(how, *numbers.draw(), delay))
    found = torch.stack(errors)
    torch.cuda.synchronize()  # before the records go
    return found


def rounds(processes: Processes) -> dict[str, Tensor]:
    """Errors of every round, by what was shared out and how."""
    delay, copies = Delays(1 + processes.rank), processes.transfer
    assert isinstance(copies, EngineCopies)
    copies.peers._memory = DelayedMemory(copies.peers._memory, delay)  # pyright: ignore[reportAttributeAccessIssue]
    found = {}
    with torch.no_grad(), one_stream(DEVICE):
        for kind, shared in (("ddp", Means), ("fsdp", Parts)):
            how, numbers = shared(processes), Numbers(processes)
            for act in (eager, replayed):
                found[f"{kind}, {act.__name__}"] = act(how, numbers, delay).cpu()
    return found


if __name__ == "__main__":
    place = Path(sys.argv[1])
    with join_processes("cuda", "copies") as together:
        unasked = of_ranks(range(together.size), "cuda").transfers
        (place / f"unasked-{together.rank}.txt").write_text(unasked)
        torch.save(rounds(together), place / f"rounds-{together.rank}.pt")
