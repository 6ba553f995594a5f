"""Steps that a compiler takes minutes for, each in a process of its own: a wave compiles, then they take turns."""

import time
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

from benchmarks.cases.meanflow.options import StepOptions
from benchmarks.cases.meanflow.step_gate import Exact
from benchmarks.cases.meanflow.step_run import Bench, LeftOut
from benchmarks.cases.meanflow.step_sections import cases_of
from benchmarks.cases.meanflow.step_setup import make_setup
from benchmarks.harness.budget import NO_TIME, one_stream, say
from benchmarks.harness.process_pool import Team, Worker, await_turn, none_left, share_cores
from benchmarks.harness.results import Row
from fullstride.device import memory
from fullstride.measure.roofline import Ceilings
from fullstride.step.torch.body import searched_convolutions

Found = tuple[list[Row], list[LeftOut]]
# Seconds after the bench's time, and of a turn, when a process that says nothing is ended: what has begun may finish.
HANGING = 600.0


@dataclass(frozen=True)
class Job:
    """A case of a section, found again by its name, and the backends it is run by."""

    section: str
    name: str
    batch: int | None
    backends: tuple[str, ...]
    ours: bool


def run_jobs(bench: Bench, jobs: list[Job], width: int) -> None:
    """Run them, `width` at once, and add what they find to the bench."""
    for start in range(0, len(jobs), width):
        wave = jobs[start : start + width]
        if bench.setup.budget.spent:
            for job in wave:
                bench.left_out += _missing(bench, job, NO_TIME)
        else:
            say(f"compiling: {', '.join(job.name for job in wave)}")
            for rows, left_out in _wave(bench, wave):
                bench.rows += rows
                bench.left_out += left_out


def _wave(bench: Bench, wave: list[Job]) -> list[Found]:
    """What each finds, in the order of the jobs."""
    setup = bench.setup
    known = (bench.profiled, setup.ceilings, setup.forward_flops)
    found: list[list[Found]] = [[] for _ in wave]
    with none_left([]) as teams:
        for job in wave:
            teams.append(Team([Worker(work, len(wave), setup.options, job, *known)]))
        until = setup.budget.until + HANGING
        pairs = list(zip(teams, found, strict=True))
        for team, own in [(team, own) for team, own in pairs if team.get_ready(until, own.append)]:
            team.measure(time.monotonic() + HANGING, own.append)
    named = zip(wave, teams, found, strict=True)
    return [own[0] if own else ([], _missing(bench, job, team.why)) for job, team, own in named]


def _missing(bench: Bench, job: Job, why: str) -> list[LeftOut]:
    size = job.batch or bench.setup.options.batch_size
    return [LeftOut(job.name, backend, size, why, job.ours) for backend in job.backends]


def work(
    parent: Connection,
    beside: int,
    options: StepOptions,
    job: Job,
    profiled: tuple[str, ...],
    ceilings: Ceilings,
    forward_flops: int,
) -> None:
    """A worker: gate the case, which compiles it; wait; time it.

    Args:
        parent: says when it is this one's turn, and hears what was found.
        beside: workers at once, that share the processor's cores.
        options: of the bench.
        job: what to run.
        profiled: names of cases whose kernels are listed.
        ceilings: of the machine, as the parent measured them.
        forward_flops: of one image, likewise.

    """
    share_cores(beside)
    setup = make_setup(replace(options, seconds=float("inf")), (ceilings, forward_flops))

    def turn() -> None:
        memory.release(setup.device)  # what the gate took, for those that are timed first
        await_turn(parent)

    with one_stream(setup.device), searched_convolutions():
        bench = Bench(setup, Exact.of(setup), profiled, turn=turn)
        case = next(c for c in cases_of(job.section, setup) if (c.name, c.batch) == (job.name, job.batch))
        bench.run(case, job.backends)
    parent.send((bench.rows, bench.left_out))
