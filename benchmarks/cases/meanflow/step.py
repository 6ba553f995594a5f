"""`python -m benchmarks meanflow-step`: cost of the JVP in a training step, compared with the roofline bound.

Steps are forward and backward, or whole with optimizer and averages, by each backend of `TrainStep`. With F the
operations of a forward pass, a step takes 3F, the tangent one F more for its share of the samples: MeanFlow over flow
matching is bounded by 1 + ratio/3. All ratios are to the fastest flow-matching step of the same run.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

from rich.table import Table

from benchmarks.cases.meanflow.options import BACKENDS, SECTIONS, StepOptions
from benchmarks.cases.meanflow.step_cases import Pass, StepCase
from benchmarks.cases.meanflow.step_gate import Exact
from benchmarks.cases.meanflow.step_run import LeftOut, StepBench
from benchmarks.cases.meanflow.step_sections import cases_of, chosen, expect_chosen
from benchmarks.cases.meanflow.step_setup import StepSetup, make_setup
from benchmarks.cases.meanflow.step_table import compare, tables
from benchmarks.harness.budget import NO_TIME, one_stream, say
from benchmarks.harness.environment import environment, slug
from benchmarks.harness.process_pool import Team, Worker, await_turn, none_left, share_cores
from benchmarks.harness.results import CaseResult, Row, at
from benchmarks.harness.table import finish
from fullstride.device import memory
from fullstride.device.select import resolve_device
from fullstride.measure.roofline import Ceilings
from fullstride.step.torch.body import searched_convolutions

Found = tuple[list[Row], list[LeftOut]]
# Seconds after the bench's time, and of a turn, when a process that says nothing is ended: what has begun may finish.
HANGING = 600.0


@dataclass(frozen=True)
class StepJob:
    """Case of a section, identified by its name, with the backends to run."""

    section: str
    name: str
    batch: int | None
    backends: tuple[str, ...]
    ours: bool


def run_jobs(bench: StepBench, jobs: list[StepJob], width: int) -> None:
    """Run the jobs, `width` at once, and add their rows to the benchmark in the order of the jobs."""
    setup = bench.setup
    for start in range(0, len(jobs), width):
        wave = jobs[start : start + width]
        found: list[list[Found]] = [[] for _ in wave]
        why = [NO_TIME] * len(wave)
        if not setup.budget.spent:
            say(f"compiling: {', '.join(job.name for job in wave)}")
            known = (bench.profiled, setup.ceilings, setup.forward_flops)
            with none_left([]) as teams:
                for job in wave:
                    teams.append(Team([Worker(work, len(wave), setup.options, job, *known)]))
                until = setup.budget.until + HANGING
                pairs = list(zip(teams, found, strict=True))
                for team, own in [(team, own) for team, own in pairs if team.get_ready(until, own.append)]:
                    team.measure(time.monotonic() + HANGING, own.append)
            why = [team.why for team in teams]
        for job, own, told in zip(wave, found, why, strict=True):
            size = job.batch or setup.options.batch_size
            missing = [LeftOut(job.name, backend, size, told, job.ours) for backend in job.backends]
            rows, left_out = own[0] if own else ([], missing)
            bench.rows += rows
            bench.left_out += left_out


def work(
    parent: Connection,
    beside: int,
    options: StepOptions,
    job: StepJob,
    profiled: tuple[str, ...],
    ceilings: Ceilings,
    forward_flops: int,
) -> None:
    """Run a worker: check the case, which compiles it; wait; time it.

    `beside` is the number of workers that share the CPU cores; rates and operations are as the parent measured
    them.
    """
    share_cores(beside)
    setup = make_setup(replace(options, seconds=float("inf")), (ceilings, forward_flops))

    def turn() -> None:
        memory.release(setup.device)  # what the gate took, for those that are timed first
        await_turn(parent)

    with one_stream(setup.device), searched_convolutions():
        bench = StepBench(setup, Exact.of(setup), profiled, turn=turn)
        case = next(c for c in cases_of(job.section, setup) if (c.name, c.batch) == (job.name, job.batch))
        bench.run(case, job.backends)
    parent.send((bench.rows, bench.left_out))


def run(options: StepOptions, out: Path) -> Path:
    """Check, measure, print the tables and write the JSON; return its path.

    ConfigError if the device is not there or cannot take the precision or a backend; if no row is asked for, or none
    was measured. GateError if a step of ours is wrong or cannot be run; the rest is measured and written before.
    """
    # For every row, as `TrainStep` does for its own.
    with one_stream(resolve_device(options.device)), searched_convolutions():
        setup = make_setup(options)
        bench = measured(setup)
    compare(bench.rows)
    result = result_of(setup, bench)

    def shown() -> Iterator[Table | str]:
        yield from tables(result, setup.options.sections)
        yield from (f"left out: {e.name}, batch {e.batch}, {e.backend}: {e.why}" for e in bench.left_out)

    wrong = [f"{e.name}, {e.backend}: {e.why}" for e in bench.left_out if e.wrong]
    return finish(result, out, shown, width=190, wrong=wrong)


def measured(setup: StepSetup) -> StepBench:
    """Measure all cases of the sections, first those without compilation, which takes minutes."""
    expect_chosen(setup)
    sections = setup.options.sections
    profiled = tuple(case.name for case in cases_of("profile", setup)) if "profile" in sections else ()
    bench = StepBench(setup, Exact.of(setup), profiled)
    say(f"{setup.options.model}, {setup.precision}: {', '.join(sections)}")
    for compiling in (False, True):
        work = []
        for section in sections:
            every = BACKENDS if section == "backends" and setup.device.type == "cuda" else setup.backends
            backends = tuple(b for b in every if ("compile" in b) == compiling)
            cases = (case for case in cases_of(section, setup) if chosen(case, setup.options.only))
            work += [(section, case, backends) for case in cases if backends]
        if compiling and setup.options.jobs > 1:
            run_jobs(bench, _jobs(work), setup.options.jobs)
            continue
        for _, case, backends in work:
            bench.run(case, backends)
    return bench


def _jobs(work: list[tuple[str, StepCase | Pass, tuple[str, ...]]]) -> list[StepJob]:
    """Return each case once, with the backends of all the sections that contain it."""
    found: dict[tuple[str, int | None], StepJob] = {}
    for section, case, backends in work:
        wanted = tuple(b for b in backends if b in (case.backends or backends))
        before = found.get((case.name, case.batch))
        every = tuple(dict.fromkeys((before.backends if before else ()) + wanted))
        if every:
            found[case.name, case.batch] = StepJob(section, case.name, case.batch, every, case.ours)
    return list(found.values())


def result_of(setup: StepSetup, bench: StepBench) -> CaseResult:
    """Return the result to write."""
    options = setup.options
    each = [(row, *error) for row in bench.rows for error in row.extra["errors"].items()]
    errors = {f"{row.name}, batch {row.extra['batch']}: {kind}": error for row, kind, error in each}
    conditions = {
        "model": options.model,
        "precision": options.precision,
        "backend": ",".join(options.backends) or "all",
        "section": "all" if set(options.sections) == set(SECTIONS) else ",".join(options.sections),
        "batch_size": options.batch_size,
        "image_shape": list(setup.shape),
        "parameters": sum(p.numel() for p in setup.model.parameters()),
        **({"step": "full", "averages": options.averages} if options.full_step else {}),
        **({"memory_order": "channels_last"} if options.channels_last else {}),
        **({"dropout": True} if options.dropout else {}),
        **({"compiled at once": options.jobs} if options.jobs > 1 else {}),
        **({"rows": slug(" ".join(options.only))} if options.only else {}),
        **at(
            batch=(options.batch_size, StepOptions.batch_size),
            averages=(options.averages if options.full_step else StepOptions.averages, StepOptions.averages),
            dropout=(options.dropout, False),
        ),
        "left_out": [vars(entry) for entry in bench.left_out],
    }
    return CaseResult("meanflow-step", setup.device.type, conditions, errors, setup.ceilings, bench.rows, environment())
