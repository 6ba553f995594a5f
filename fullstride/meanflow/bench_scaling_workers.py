"""The processes of the bench of several GPUs: sets of as many as there are GPUs, one set a network and ratio.

All sets compile at once, which takes minutes; then each has the machine to itself. Every process says when it is ready
and waits for the word.
"""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from fullstride.bench.floor import Ceilings
from fullstride.bench.session import NO_TIME, Budget, one_stream, reason, say
from fullstride.meanflow import memory
from fullstride.meanflow.bench_scaling_memory import Memory
from fullstride.meanflow.bench_scaling_options import Options, counts
from fullstride.meanflow.bench_scaling_steps import Measured, Steps, groups_of
from fullstride.meanflow.bench_step_options import Options as StepOptions
from fullstride.meanflow.bench_step_setup import make_setup
from fullstride.step.torch import joined
from fullstride.step.torch.body import searched_convolutions

READY, GO = "ready", "go"
# What a set may take beyond the bench's own time before its processes are ended.
GRACE = 60.0


@dataclass(frozen=True)
class Job:
    """A set's: a network's steps at a ratio, or the memory of the largest network."""

    model: str
    ratio: float | None = None
    known: tuple[Ceilings, int] | None = None

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.model}, memory" if self.ratio is None else f"{self.model}, ratio {self.ratio:.0%}"


@dataclass(frozen=True)
class Found:
    """What a set has measured, or why it has not."""

    job: Job
    rows: list[Measured]
    errors: dict[str, float]
    why: str = ""


def step_options(options: Options, model: str) -> StepOptions:
    """Those of one network's setup."""
    # Convolutions are fastest in that order; a transformer has none.
    last = model.startswith(("unet", "song_unet")) and options.device != "cpu"
    sizes = {"batch_size": options.batch_size, "full_step": True, "averages": options.averages}
    return StepOptions(options.device, options.precision, model, channels_last=last, seconds=float("inf"), **sizes)


class Set:
    """Processes of one job."""

    def __init__(self, job: Job, options: Options, size: int, beside: int):
        """Start them."""
        self.job = job
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.processes, self.connections = [], []
        for rank in range(size):
            ours, theirs = get_context("spawn").Pipe()
            given = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": size,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            }
            threads = max(1, (os.cpu_count() or 1) // beside)
            process = get_context("spawn").Process(
                target=work, args=(theirs, given, job, options, threads), daemon=True
            )
            process.start()
            theirs.close()
            self.processes.append(process)
            self.connections.append(ours)

    def heard(self, budget: Budget) -> list[Any]:
        """What each process says next; None of one that has died or said nothing in time."""
        said: dict[Connection, Any] = {}
        while len(said) < len(self.connections):
            left = budget.until + GRACE - time.monotonic()
            found = wait([c for c in self.connections if c not in said], timeout=max(0.0, left))
            for connection in found or [c for c in self.connections if c not in said]:
                assert isinstance(connection, Connection)
                try:
                    said[connection] = connection.recv() if found else None
                except EOFError:
                    said[connection] = None
            if None in said.values():
                self.end()  # the others would wait for it
        return [said[connection] for connection in self.connections]

    def go(self) -> None:
        """Give them the machine."""
        for connection in self.connections:
            connection.send(GO)

    def end(self) -> None:
        """End those that still run."""
        for process in self.processes:
            process.kill()

    def join(self) -> None:
        """Wait for their end, some seconds."""
        for process in self.processes:
            process.join(timeout=30)
        self.end()


def run_sets(jobs: list[Job], options: Options, size: int, budget: Budget) -> list[Found]:
    """All jobs' findings, in their order."""
    with _all_ended([Set(job, options, size, len(jobs)) for job in jobs]) as sets:
        say(f"compiling: {'; '.join(job.name for job in jobs)}")
        ready = [each.heard(budget) for each in sets]
        return [_turn(each, said, budget) for each, said in zip(sets, ready, strict=True)]


@contextmanager
def _all_ended(sets: list[Set]) -> Iterator[list[Set]]:
    try:
        yield sets
    finally:
        for each in sets:
            each.end()


def _turn(each: Set, said: list[Any], budget: Budget) -> Found:
    if budget.spent or said != [READY] * len(said):
        each.end()
        told = next((s for s in said if isinstance(s, str) and s != READY), "a process of it has ended")
        return Found(each.job, [], {}, NO_TIME if budget.spent else told)
    say(f"timing: {each.job.name}")
    each.go()
    found = each.heard(budget)
    each.join()
    if isinstance(found[0], tuple):
        return Found(each.job, *found[0])
    return Found(each.job, [], {}, next((s for s in found if isinstance(s, str)), "a process of it has ended"))


def work(parent: Connection, given: dict[str, Any], job: Job, options: Options, threads: int) -> None:
    """One process: join the others, compile, wait for the word, measure; the first one tells.

    Args:
        parent: hears `READY`, or why not, and says `GO`; then hears what was found.
        given: what torchrun would tell.
        job: what to measure.
        options: of the bench.
        threads: that the compiler may use.

    """
    os.environ |= {name: str(value) for name, value in given.items()}
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(threads))
    try:
        parent.send(_measured(parent, job, options))
    except Exception as error:
        parent.send(reason(error))


def _measured(parent: Connection, job: Job, options: Options) -> tuple[list[Measured], dict[str, float]]:
    with joined(options.device) as everyone:
        device = torch.device(options.device)
        groups = groups_of(counts(everyone.size), options.device)
        with one_stream(device), searched_convolutions():
            errors = {}
            if job.ratio is None:
                bench = Memory(options, device, everyone)
            else:
                setup = make_setup(step_options(options, job.model), job.known)
                bench = Steps(options, setup, setup.loss(job.ratio, split="shared"), everyone)
                errors = bench.compile()
            memory.release(device)  # what the gate took
            parent.send(READY)
            parent.recv()
            return bench.measure(groups), errors
