"""`python -m benchmarks meanflow-jax`: MeanFlow's whole step in PyTorch and in JAX, on one device in one run.

Both begin with the same weights and take the same noise and times. PyTorch carries all samples through one pass, with a
tangent for some of them; JAX takes those with a tangent and those without in a pass each, and PyTorch so, too, in rows
of their own.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks.cases.meanflow.framework_worker import JAX, PYTORCH, FrameworkJob, Measured, work
from benchmarks.cases.meanflow.options import FrameworkOptions, StepOptions
from benchmarks.cases.meanflow.step import HANGING
from benchmarks.cases.meanflow.step_cases import StepCase
from benchmarks.cases.meanflow.step_gate import TOLERANCE, Exact
from benchmarks.cases.meanflow.step_sections import FLOW_MATCHING, flow_matching, meanflow
from benchmarks.cases.meanflow.step_setup import StepSetup, make_setup, weight_passes
from benchmarks.harness.budget import NO_MEMORY, NO_TIME, Budget
from benchmarks.harness.environment import environment, xla_flags
from benchmarks.harness.process_pool import Team, Worker, none_left
from benchmarks.harness.results import CaseResult, Row, at
from benchmarks.harness.table import BOUND, Columns, finish, first_call, legend, median, peak, rows_table, spread
from fullstride.device import memory
from fullstride.device.select import resolve_device
from fullstride.errors import ConfigError
from fullstride.meanflow.config.presets import MODELS
from fullstride.meanflow.objective.times import meanflow_count


def _over(name: str) -> Any:
    """Return a column of a ratio that a row may have."""
    return lambda row: f"{row.extra[name]:.2f}" if name in row.extra else ""


COLUMNS: Columns = (
    *(("step", lambda row: row.extra["name"]), ("by", lambda row: row.extra["framework"])),
    *(("ms", median), ("p10-p90", spread), *BOUND),
    *(("x its FM", _over("over_flow_matching")), ("at least", lambda row: f"{row.extra['forwards'] / 3:.2f}")),
    *(("x PyTorch", _over("over_pytorch")), ("GiB", peak), ("first s", first_call)),
    ("error", lambda row: f"{max(row.extra['errors'].values()):.1e}"),
)


@dataclass
class Outcome:
    """Job with what came of it."""

    job: FrameworkJob
    together: int = 1  # jobs that compiled at once
    measured: Measured | None = None
    why: str = NO_TIME


def run(options: FrameworkOptions, out: Path) -> Path:
    """Check, measure, print the table and write the JSON; return its path.

    ConfigError if the device is not there or cannot take the precision, or nothing was measured. GateError if a step is
    wrong or cannot be run; the rest is measured and written before.
    """
    budget, device = Budget.of(options.seconds), resolve_device(options.device)
    if device.type == "mps":
        raise ConfigError("--device=mps: expected cuda or cpu, on which both frameworks run")
    setup = make_setup(step_options(options, device.type))
    with tempfile.TemporaryDirectory(prefix="meanflow_jax_") as folder:
        outcomes = [Outcome(job) for job in written(setup, options, Path(folder))]
        setup.model.cpu()  # the memory is the processes'
        memory.release(device)
        both = [[each for each in outcomes if each.job.framework == framework] for framework in (PYTORCH, JAX)]
        for start in range(0, len(outcomes), options.jobs):
            for own in both:
                run_together(own[start : start + options.jobs], budget)
    result = result_of(setup, options, outcomes)
    left_out = result.conditions["left_out"]

    def shown() -> Iterator[Table | str]:
        conditions = ", ".join(f"{k} {v}" for k, v in result.conditions.items() if k != "left_out")
        yield rows_table(f"{result.case}: {conditions}", COLUMNS, result.rows, legend(result))
        yield from (f"left out: {each['name']}: {each['why']}" for each in left_out)

    wrong = [f"{each['name']}: {each['why']}" for each in left_out if each["why"] not in (NO_TIME, NO_MEMORY)]
    return finish(result, out, shown, width=160, wrong=wrong)


def step_options(options: FrameworkOptions, device: str) -> StepOptions:
    """Return the options of the network's setup, for whole steps without averages."""
    return StepOptions(
        device=device,
        precision=options.precision,
        model=options.model,
        batch_size=options.batch_size,
        channels_last=MODELS[options.model]().convolutional,
        full_step=True,
        averages=0,
    )


def cases_of(setup: StepSetup, ratios: tuple[float, ...]) -> list[StepCase]:
    """Return flow matching, and MeanFlow with each share of the samples in the JVP."""
    return [flow_matching(setup), *(meanflow(setup, ratio) for ratio in ratios)]


def written(setup: StepSetup, options: FrameworkOptions, folder: Path) -> list[FrameworkJob]:
    """Write weights and references to a folder, and return the jobs in the order of timing.

    `weights.npz` has the parameters and buffers by name; a file for each case has a batch (`x`, `e`, `t`, `r`), its
    `loss` and the gradients by the parameters' names, in fp64 rounded to fp32.
    """
    model, exact, size = setup.model, Exact.of(setup), options.batch_size
    named = dict(model.named_parameters())
    _save(folder / "weights.npz", {k: _array(x) for k, x in (*named.items(), *model.named_buffers())})
    jobs = []
    for case in cases_of(setup, options.ratios):
        loss, count = case.loss, meanflow_count(case.loss.ratio, size)
        value, gradient = exact.step(loss, size)
        parts = gradient.split([p.numel() for p in named.values()])
        gradients = {name: _array(part.reshape(p.shape)) for (name, p), part in zip(named.items(), parts, strict=True)}
        drawn = {name: _array(x) for name, x in exact.batch(loss, size).items()}
        job = FrameworkJob(
            PYTORCH,
            case.name,
            loss.ratio,
            count,
            loss.weighting_power,
            loss.weighting_eps,
            options=setup.options,
            known=(setup.ceilings, setup.forward_flops),
            folder=folder,
            tolerance=TOLERANCE[setup.precision],
        )
        _save(job.reference, {"loss": np.asarray(value.item()), **drawn, **gradients})
        jobs += [job, in_jax := replace(job, framework=JAX)]
        if setup.device.type == "cuda" and setup.precision == "bf16" and count < size:
            jobs.append(replace(in_jax, attention="cudnn"))
        if 0 < count < size:
            jobs.append(replace(job, split="static"))
    return jobs


def _array(x: Any) -> np.ndarray:
    """Return a tensor in fp32 on the host, in C order."""
    return np.ascontiguousarray(x.detach().float().cpu().numpy())


def _save(path: Path, arrays: dict[str, Any]) -> None:
    np.savez(path, **arrays)


def run_together(outcomes: list[Outcome], budget: Budget) -> None:
    """Run jobs that compile at once and are timed in turns, unless the time is over."""
    if budget.spent:
        return
    until = budget.until + HANGING
    with none_left([]) as teams:
        for each in outcomes:
            each.together = len(outcomes)
            teams.append(Team([Worker(work, len(outcomes), each.job)]))
        pairs = list(zip(teams, outcomes, strict=True))
        ready = [(team, each) for team, each in pairs if team.get_ready(until, lambda _: None)]
        for team, each in ready:
            team.measure(until, lambda found, each=each: setattr(each, "measured", found))
        for team, each in pairs:
            each.why = team.why


def result_of(setup: StepSetup, options: FrameworkOptions, outcomes: list[Outcome]) -> CaseResult:
    """Return the result to write."""
    rows = [row for each in outcomes for row in _rows(setup, each)]
    compare(rows)
    errors = {f"{row.name}: {kind}": error for row in rows for kind, error in row.extra["errors"].items()}
    conditions = {
        "model": options.model,
        "precision": options.precision,
        "batch_size": options.batch_size,
        "image_shape": list(setup.shape),
        "parameters": sum(p.numel() for p in setup.model.parameters()),
        "compiled at once": options.jobs,
        "xla_flags": xla_flags(),
        **at(
            batch=(options.batch_size, FrameworkOptions.batch_size),
            ratios=(options.ratios, FrameworkOptions.ratios),
        ),
        "left_out": [{"name": f"{e.job.name}, {e.job.by}", "why": e.why} for e in outcomes if e.measured is None],
    }
    code = [each.measured.code for each in outcomes if each.measured is not None]
    kind = setup.device.type
    return CaseResult("meanflow-jax", kind, conditions, errors, setup.ceilings, rows, environment(code))


def _rows(setup: StepSetup, outcome: Outcome) -> Iterator[Row]:
    """Yield the row of a job, if it was measured."""
    job, found = outcome.job, outcome.measured
    if found is None:
        return
    extra = {
        "name": job.name,
        "framework": job.by,
        "ratio": job.ratio,
        "forwards": 3 + job.ratio,
        "errors": found.errors,
    }
    extra |= {"first_s": found.timing.first_ms / 1e3, "compiled_at_once": outcome.together, **found.notes}
    bound = setup.floor(3 + job.ratio, weight_passes(0), setup.options.batch_size)
    yield Row(f"{job.name}, {job.by}", found.timing, bound, extra)


def compare(rows: list[Row]) -> None:
    """Add to each row its ratios to the fastest flow matching of its framework, and to the same step in PyTorch."""
    times = {(row.extra["name"], row.extra["framework"]): row.timing.median_ms for row in rows}
    for row in rows:
        extra, ms = row.extra, row.timing.median_ms
        framework = extra["framework"].partition(",")[0]
        own = [time for (name, by), time in times.items() if name == FLOW_MATCHING and by.startswith(framework)]
        if own:
            extra["over_flow_matching"] = ms / min(own)
        if (theirs := times.get((extra["name"], PYTORCH))) is not None:
            extra["over_pytorch"] = ms / theirs
