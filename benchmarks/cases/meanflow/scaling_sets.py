"""Teams of processes for the benchmark on several GPUs: a process per GPU, a team per network and ratio.

All teams start and compile at once, which takes minutes; then each has the machine to itself. The first process of a
team tells each row as soon as it is known.
"""

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.cases.meanflow.options import ScalingOptions, StepOptions, counts
from benchmarks.cases.meanflow.scaling_memory import Memory
from benchmarks.cases.meanflow.scaling_steps import Measured, Steps
from benchmarks.cases.meanflow.step_setup import make_setup
from benchmarks.harness.budget import NO_TIME, Budget, one_stream, say
from benchmarks.harness.process_pool import GRACE, UNFINISHED, Team, Worker, await_turn, none_left, share_cores
from fullstride.device import memory
from fullstride.meanflow.config.presets import MODELS
from fullstride.step.torch import join_processes
from fullstride.step.torch.body import searched_convolutions
from fullstride.step.torch.distributed.join import of_ranks

# Of the bench's time, the part in which teams must be ready: those that are not are left out, the others still timed.
COMPILING = 0.75


@dataclass(frozen=True)
class ScalingJob:
    """Job of a team: a network's steps at a ratio, or the memory of the largest network."""

    model: str
    ratio: float | None = None

    @property
    def name(self) -> str:
        """Return a readable name."""
        return f"{self.model}, memory" if self.ratio is None else f"{self.model}, ratio {self.ratio:.0%}"


def step_options(options: ScalingOptions, model: str) -> StepOptions:
    """Return the options of one network's setup."""
    # Convolutions are fastest in that order; a transformer has none.
    last = MODELS[model]().convolutional and options.device != "cpu"
    sizes = {"batch_size": options.batch_size, "full_step": True, "averages": options.averages}
    return StepOptions(options.device, options.precision, model, channels_last=last, seconds=float("inf"), **sizes)


def work(parent: Connection, given: dict[str, Any], job: ScalingJob, options: ScalingOptions, beside: int) -> None:
    """Run one process: join the others, compile, wait for the turn, measure; rank 0 reports.

    The parent says the machine's rates and the operations of a forward pass of one image; hears errors, and that
    all is compiled; says when it is this one's turn; then hears what is found. `given` is the environment that
    torchrun would set, and `beside` the number of processes that share the CPU cores.
    """
    os.environ |= {name: str(value) for name, value in given.items()}
    share_cores(beside)
    known = parent.recv()
    with join_processes(options.device, "nccl") as everyone:
        # How much memory there is does not depend on what gradients travel by.
        ways = options.transfers[:1] if job.ratio is None or options.device != "cuda" else options.transfers
        # The first n processes for each n above 1 and each way of transfers that there is; collective.
        sizes = [(n, way) for n in counts(everyone.size) if n > 1 for way in ways]
        groups = tuple((n, of_ranks(range(n), options.device, way)) for n, way in sizes)
        device = torch.device(options.device)
        with one_stream(device), searched_convolutions():
            if job.ratio is None:
                bench = Memory(options, device, everyone)
            else:
                setup = make_setup(step_options(options, job.model), known)
                bench = Steps(options, setup, setup.loss(job.ratio, split="shared"), everyone)
                errors = bench.compile(groups)
                if everyone.leads:
                    parent.send(errors)
            memory.release(device)  # what the gate took
            await_turn(parent)
            for row in bench.measure(groups):
                if everyone.leads:
                    parent.send(row)


@dataclass
class Found:
    """Measurements of a team so far, and why some are missing."""

    job: ScalingJob  # the team's
    rows: list[Measured] = field(default_factory=list)  # measured
    errors: dict[str, float] = field(default_factory=dict)  # of each kind's steps, beside eager fp32
    ready_s: float | None = None  # from the start of the processes until they had compiled; None of one that has not
    why: str = UNFINISHED  # there are no more rows; empty where all are there


@contextmanager
def started(jobs: list[ScalingJob], options: ScalingOptions, size: int) -> Iterator[list[Team]]:
    """Start the jobs' teams, which prepare on the CPU until they receive the machine's rates.

    The processes of each meet as torchrun's would; all of them share the processor.
    """
    with none_left([]) as teams:
        for job in jobs:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free.getsockname()[1], "WORLD_SIZE": size}
            given = [place | {"RANK": n, "LOCAL_RANK": n} for n in range(size)]
            teams.append(Team([Worker(work, each, job, options, size * len(jobs)) for each in given]))
        yield teams


def run_sets(teams: list[Team], every: list[Found], budget: Budget, keep: Callable[[Found], None]) -> None:
    """Wait until all have compiled, and time one after the other; call `keep` with each new row."""
    say(f"compiling: {'; '.join(found.job.name for found in every)}")
    now = time.monotonic()
    by = now + COMPILING * max(0.0, budget.until - now)
    pairs = list(zip(teams, every, strict=True))
    ready = [(team, found) for team, found in pairs if team.get_ready(by, found.errors.update)]
    for team, found in pairs:
        found.ready_s, found.why = team.ready_s, team.why
    for team, found in ready:
        if budget.spent:
            found.why = NO_TIME
            team.end()
        else:
            say(f"timing: {found.job.name}, ready after {found.ready_s:.0f} s")

            def take(row: Measured, found: Found = found) -> None:
                found.rows.append(row)
                keep(found)

            team.measure(budget.until + GRACE, take)
            found.why = team.why
