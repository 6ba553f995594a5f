"""`python -m benchmarks meanflow-step`: what the JVP adds to a training step, beside the arithmetic's floor.

Steps are forward and backward, or whole with optimizer and averages, by each backend of `TrainStep`. With F the
operations of a forward pass, a step takes 3F, the tangent one F more for its share of the samples: MeanFlow over flow
matching is bound by 1 + ratio/3. All ratios are to the fastest flow-matching step of the same run.
"""

from collections.abc import Iterator
from pathlib import Path

from rich.table import Table

from benchmarks.cases.meanflow.options import SECTIONS, StepOptions
from benchmarks.cases.meanflow.step_cases import Case
from benchmarks.cases.meanflow.step_gate import Exact
from benchmarks.cases.meanflow.step_passes import Pass
from benchmarks.cases.meanflow.step_run import Bench
from benchmarks.cases.meanflow.step_sections import backends_of, cases_of, chosen, expect_chosen
from benchmarks.cases.meanflow.step_setup import Setup, make_setup
from benchmarks.cases.meanflow.step_table import compare, tables
from benchmarks.cases.meanflow.step_workers import Job, run_jobs
from benchmarks.harness.budget import one_stream, say
from benchmarks.harness.environment import environment, slug
from benchmarks.harness.results import CaseResult, at
from benchmarks.harness.table import finish
from fullstride.device.select import resolve_device
from fullstride.step.torch.body import searched_convolutions

WIDTH = 190  # of the tables


def run(options: StepOptions, out: Path) -> Path:
    """Gate, measure, print the tables and write the JSON, whose path is returned.

    Raises:
        ConfigError: if the device is not there or cannot take the precision or a backend; if no row is asked for, or
            none was measured.
        GateError: if a step of ours is wrong or cannot be run; the rest is measured and written before.

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
    return finish(result, out, shown, width=WIDTH, wrong=wrong)


def measured(setup: Setup) -> Bench:
    """All cases of the sections: first by what needs no compiler, as that takes minutes."""
    expect_chosen(setup)
    sections = setup.options.sections
    profiled = tuple(case.name for case in cases_of("profile", setup)) if "profile" in sections else ()
    bench = Bench(setup, Exact.of(setup), profiled)
    say(f"{setup.options.model}, {setup.precision}: {', '.join(sections)}")
    for compiling in (False, True):
        work = []
        for section in sections:
            backends = tuple(b for b in backends_of(section, setup) if ("compile" in b) == compiling)
            cases = (case for case in cases_of(section, setup) if chosen(case, setup.options.only))
            work += [(section, case, backends) for case in cases if backends]
        if compiling and setup.options.jobs > 1:
            run_jobs(bench, _jobs(work), setup.options.jobs)
            continue
        for _, case, backends in work:
            bench.run(case, backends)
    return bench


def _jobs(work: list[tuple[str, Case | Pass, tuple[str, ...]]]) -> list[Job]:
    """Each case once, by the backends of all the sections that have it."""
    found: dict[tuple[str, int | None], Job] = {}
    for section, case, backends in work:
        wanted = tuple(b for b in backends if b in (case.backends or backends))
        before = found.get((case.name, case.batch))
        every = tuple(dict.fromkeys((before.backends if before else ()) + wanted))
        if every:
            found[case.name, case.batch] = Job(section, case.name, case.batch, every, case.ours)
    return list(found.values())


def result_of(setup: Setup, bench: Bench) -> CaseResult:
    """What is written."""
    options = setup.options
    errors = {
        f"{row.name}, batch {row.extra['batch']}: {k}": e for row in bench.rows for k, e in row.extra["errors"].items()
    }
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
