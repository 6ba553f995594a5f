"""Steps that a compiler takes minutes for, each in a process of its own: all of a wave compile, then they take turns.

A worker says when it is ready to be timed and waits for the word; it then has the device and the processor to itself.
"""

import os
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

from fullstride.bench.floor import Ceilings
from fullstride.bench.results import Row
from fullstride.bench.session import NO_TIME, one_stream, say
from fullstride.meanflow import memory
from fullstride.meanflow.bench_step_gate import Exact
from fullstride.meanflow.bench_step_options import Options
from fullstride.meanflow.bench_step_run import Bench, LeftOut
from fullstride.meanflow.bench_step_sections import cases_of
from fullstride.meanflow.bench_step_setup import make_setup
from fullstride.step.torch.body import searched_convolutions

READY, GO = "ready", "go"
Found = tuple[list[Row], list[LeftOut]]


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
    setup, started = bench.setup, {}
    for job in wave:
        ours, theirs = get_context("spawn").Pipe()
        known = (setup.options, job, bench.profiled, setup.ceilings, setup.forward_flops)
        process = get_context("spawn").Process(target=work, args=(theirs, len(wave), *known), daemon=True)
        process.start()
        theirs.close()
        started[ours] = job, process
    said: dict[Connection, Any] = {}
    while len(said) < len(started):
        for connection in wait([c for c in started if c not in said]):
            assert isinstance(connection, Connection)
            said[connection] = _heard(connection)
    found = []
    for connection, (job, process) in started.items():
        if said[connection] == READY:
            connection.send(GO)
            said[connection] = _heard(connection)
        process.join()
        died = f"its process ended with exit code {process.exitcode}"
        found.append(said[connection] or ([], _missing(bench, job, died)))
    return found


def _heard(connection: Connection) -> Any:
    """What a worker says, or None where it is dead."""
    try:
        return connection.recv()
    except EOFError:
        return None


def _missing(bench: Bench, job: Job, why: str) -> list[LeftOut]:
    size = job.batch or bench.setup.options.batch_size
    return [LeftOut(job.name, backend, size, why, job.ours) for backend in job.backends]


def work(
    parent: Connection,
    beside: int,
    options: Options,
    job: Job,
    profiled: tuple[str, ...],
    ceilings: Ceilings,
    forward_flops: int,
) -> None:
    """A worker: gate the case, which compiles it; wait; time it.

    Args:
        parent: hears `READY` and says `GO`; then hears what was found.
        beside: workers at once, that share the processor's cores.
        options: of the bench.
        job: what to run.
        profiled: names of cases whose kernels are listed.
        ceilings: of the machine, as the parent measured them.
        forward_flops: of one image, likewise.

    """
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(1, (os.cpu_count() or 1) // beside)))
    setup = make_setup(replace(options, seconds=float("inf")), (ceilings, forward_flops))

    def turn() -> None:
        memory.release(setup.device)  # what the gate took, for those that are timed first
        parent.send(READY)
        parent.recv()

    with one_stream(setup.device), searched_convolutions():
        bench = Bench(setup, Exact.of(setup), profiled, turn=turn)
        case = next(c for c in cases_of(job.section, setup) if (c.name, c.batch) == (job.name, job.batch))
        bench.run(case, job.backends)
    parent.send((bench.rows, bench.left_out))
