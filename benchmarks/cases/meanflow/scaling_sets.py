"""Teams of processes of the bench of several GPUs: as many as there are GPUs, one team a network and ratio.

All teams start and compile at once, which takes minutes; then each has the machine to itself. The first process of a
team tells each row as soon as it is known.
"""

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from benchmarks.cases.meanflow.options import ScalingOptions
from benchmarks.cases.meanflow.scaling_steps import Measured
from benchmarks.cases.meanflow.scaling_workers import Job, work
from benchmarks.harness.budget import NO_TIME, Budget, say
from benchmarks.harness.process_pool import GRACE, UNFINISHED, Team, Worker, none_left

# Of the bench's time, the part in which teams must be ready: those that are not are left out, the others still timed.
COMPILING = 0.75


@dataclass
class Found:
    """Measurements of a team so far, and why not all."""

    job: Job  # the team's
    rows: list[Measured] = field(default_factory=list)  # measured
    errors: dict[str, float] = field(default_factory=dict)  # of each kind's steps, beside eager fp32
    ready_s: float | None = None  # from the start of the processes until they had compiled; None of one that has not
    why: str = UNFINISHED  # there are no more rows; empty where all are there


def workers_of(job: Job, options: ScalingOptions, size: int, beside: int) -> list[Worker]:
    """Start a job's processes, which meet as torchrun's would; `beside` of them share the processor."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free.getsockname()[1], "WORLD_SIZE": size}
    return [Worker(work, place | {"RANK": n, "LOCAL_RANK": n}, job, options, beside) for n in range(size)]


@contextmanager
def started(jobs: list[Job], options: ScalingOptions, size: int) -> Iterator[list[Team]]:
    """Their teams, which prepare what needs no GPU until they are told the machine's rates."""
    with none_left([]) as teams:
        for job in jobs:
            teams.append(Team(workers_of(job, options, size, size * len(jobs))))
        yield teams


def run_sets(teams: list[Team], every: list[Found], budget: Budget, keep: Callable[[Found], None]) -> None:
    """Wait until all have compiled, and time one after the other; `keep` is called with each new row."""
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
            _time(team, found, budget, keep)


def _time(team: Team, found: Found, budget: Budget, keep: Callable[[Found], None]) -> None:
    def take(row: Measured) -> None:
        found.rows.append(row)
        keep(found)

    team.measure(budget.until + GRACE, take)
    found.why = team.why
