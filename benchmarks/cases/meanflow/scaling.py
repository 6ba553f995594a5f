"""`python -m benchmarks meanflow-scaling`: whole training steps on one GPU and on several, in the same run.

Each GPU keeps its batch, so that n of them should make n times as many images a second: efficiency is the time of one
alone over that of each among n. Transfers of gradients may keep it below 1; each row
has the time of a transfer of as many bytes on idle GPUs.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.table import Table
from torch.cuda import nccl

from benchmarks.cases.meanflow.options import ScalingOptions
from benchmarks.cases.meanflow.scaling_sets import Found, ScalingJob, run_sets, started, step_options
from benchmarks.cases.meanflow.scaling_steps import Measured
from benchmarks.cases.meanflow.step_setup import StepSetup, make_setup, weight_passes
from benchmarks.harness.budget import NO_MEMORY, NO_TIME, Budget, say
from benchmarks.harness.environment import environment, slug
from benchmarks.harness.results import CaseResult, Row, at, write_result
from benchmarks.harness.table import Columns, finish, gib, median, peak, rows_table, spread
from fullstride.device import memory
from fullstride.device.precision import set_precision
from fullstride.device.select import resolve_device
from fullstride.errors import ConfigError
from fullstride.measure.roofline import Ceilings, RooflineBound, measure_ceilings
from fullstride.measure.timing import Timing

# Folder for rows until all are known, so that an interrupted benchmark replaces no whole result.
UNFINISHED = "unfinished"


@dataclass
class ScalingBench:
    """Measurements so far, written with every new row so that an interrupted benchmark keeps its results."""

    options: ScalingOptions
    out: Path
    size: int
    setups: dict[str, StepSetup]
    ceilings: Ceilings
    found: list[Found]
    unfinished: Path | None = None

    def result(self) -> CaseResult:
        """Return the result of the rows so far."""
        rows = [row for each in self.found for row in _rows(each, self)]
        given = {"batch": (self.options.batch_size, ScalingOptions.batch_size)}
        for name in ("averages", "ratios", "kinds", "transfers", "processes", "largest"):
            given[name] = (getattr(self.options, name), getattr(ScalingOptions, name))
        models = dict.fromkeys(each.job.model for each in self.found if each.job.ratio is not None)
        largest = next((each.job.model for each in self.found if each.job.ratio is None), None)
        weights = {name: sum(p.numel() for p in each.model.parameters()) for name, each in self.setups.items()}
        conditions = {
            "model": ",".join(models or [largest or ""]),
            "precision": self.options.precision,
            "backend": self.options.backend,
            **({"rows": slug(" ".join(self.options.only))} if self.options.only else {}),
            **at(**given),
            "batch_size": self.options.batch_size,
            "averages": self.options.averages,
            "processes": self.size,
            **({"largest": largest} if largest else {}),
            "parameters": weights,
            **({"nccl": ".".join(map(str, nccl.version()))} if self.options.device == "cuda" else {}),
            "ready_seconds": {each.job.name: each.ready_s for each in self.found if each.ready_s is not None},
            "left_out": [{"name": each.job.name, "why": each.why} for each in self.found if each.why],
        }
        errors = {f"{each.job.name}, {kind}": error for each in self.found for kind, error in each.errors.items()}
        device = self.options.device
        return CaseResult("meanflow-scaling", device, conditions, errors, self.ceilings, rows, environment())

    def keep(self, found: Found) -> None:
        """Print the newest row, and write all rows."""
        row = _rows(found, self)[-1]
        told = f", {row.extra['efficiency']:.1%} efficient" if "efficiency" in row.extra else ""
        say(f"{row.name}: {row.timing.median_ms:.2f} ms{told}")
        path = write_result(self.result(), self.out / UNFINISHED)
        if self.unfinished not in (None, path):  # rows that the time cost change the name
            self.unfinished.unlink(missing_ok=True)
        self.unfinished = path

    def forget_unfinished(self) -> None:
        """Delete the unfinished result after the whole one is written."""
        if self.unfinished is not None:
            self.unfinished.unlink(missing_ok=True)
        with suppress(OSError):  # another's may be there, or none
            (self.out / UNFINISHED).rmdir()


def run(options: ScalingOptions, out: Path) -> Path:
    """Measure, print the tables and write the JSON; return its path.

    ConfigError if the device is not there, or has too few GPUs, or nothing is to be or was measured. GateError if a
    step is wrong or cannot be run; the rest is measured and written before.
    """
    budget, device = Budget.of(options.seconds), resolve_device(options.device)
    there = torch.cuda.device_count() if device.type == "cuda" else 2
    if options.processes > there and device.type == "cuda":
        raise ConfigError(f"--processes={options.processes}: expected at most {there}, the number of GPUs")
    size = options.processes or there
    # Compilers and records are for GPUs: on a CPU only the transfers are of interest.
    options = replace(options, device=device.type, **({} if device.type == "cuda" else {"backend": "eager"}))
    jobs = _jobs(options)
    with started(jobs, options, size) as sets:
        # The processes start meanwhile, and take their GPUs when they are told the rates.
        timed = dict.fromkeys(job.model for job in jobs if job.ratio is not None)
        setups = {name: make_setup(step_options(options, name)) for name in timed}
        if setups:
            ceilings = next(iter(setups.values())).ceilings
        else:
            set_precision(options.precision, device)
            ceilings = measure_ceilings(device.type, "bfloat16" if options.precision == "bf16" else "float32")
        bench = ScalingBench(options, out, size, setups, ceilings, [Found(job) for job in jobs])
        for setup in setups.values():
            setup.model.cpu()  # the memory is the processes'
        memory.release(device)
        for each, job in zip(sets, jobs, strict=True):
            own = setups.get(job.model) if job.ratio is not None else None
            each.tell((bench.ceilings, own.forward_flops if own else 0))
        run_sets(sets, bench.found, budget, bench.keep)
    result, left_out = bench.result(), [(each.job.name, each.why) for each in bench.found if each.why]

    def shown() -> Iterator[Table | str]:
        bench.forget_unfinished()  # the whole is written
        yield rows_table(f"{result.case}: {options.precision}", COLUMNS, result.rows)
        yield from (f"left out: {name}: {why}" for name, why in left_out)

    wrong = [f"{name}: {why}" for name, why in left_out if why not in (NO_TIME, NO_MEMORY)]
    return finish(result, out, shown, width=150, wrong=wrong)


def _jobs(options: ScalingOptions) -> list[ScalingJob]:
    """Return the jobs in the order of timing; the largest network's memory is last, and only on a GPU."""
    jobs = [ScalingJob(model, ratio) for ratio in options.ratios for model in options.models]
    if options.largest and options.device == "cuda":
        jobs.append(ScalingJob(options.largest))
    chosen = [job for job in jobs if not options.only or any(part in job.name for part in options.only)]
    if not chosen:
        raise ConfigError(
            f"--only {' '.join(options.only)}: expected a part of one of {'; '.join(job.name for job in jobs)}"
        )
    return chosen


def _rows(found: Found, bench: ScalingBench) -> list[Row]:
    """Return the rows of a set; the first, of a single process, is the baseline of the others."""
    rows = []
    for measured in found.rows:
        timing = Timing(measured.first_ms, measured.samples_ms, measured.peak_bytes)
        beside = f"{measured.count} process{'es' * (measured.count > 1)}"
        by = [measured.kind, *filter(None, [measured.extra.get("transfers")])] if measured.count > 1 else []
        name = ", ".join([found.job.name, beside, *by])
        extra = {"model": found.job.model, "ratio": found.job.ratio, "processes": measured.count, "kind": measured.kind}
        if found.job.ratio is not None:
            alone = Timing(0.0, found.rows[0].samples_ms, None)
            extra |= {"efficiency": alone.median_ms / timing.median_ms, "batch": bench.options.batch_size}
        rows.append(Row(name, timing, _floor(found.job, measured, bench), extra | measured.extra))
    return rows


def _floor(job: ScalingJob, measured: Measured, bench: ScalingBench) -> RooflineBound:
    """Return the roofline bound of one process's arithmetic and of its share of the weights' bytes."""
    if job.ratio is None:
        return RooflineBound(0.0, 1e3 * measured.extra["state_bytes"] / bench.ceilings.bytes)
    parts = measured.count if measured.kind == "fsdp" else 1
    passes = weight_passes(bench.options.averages, parts)
    return bench.setups[job.model].floor(3 + job.ratio, passes, bench.options.batch_size)


COLUMNS: Columns = (
    *(("step", lambda row: row.name), ("ms", median), ("p10-p90", spread)),
    ("efficiency", lambda row: f"{row.extra['efficiency']:.1%}" if "efficiency" in row.extra else ""),
    ("transfer ms", lambda row: f"{row.extra['transfer_ms']:.2f}" if "transfer_ms" in row.extra else ""),
    ("early", lambda row: str(row.extra.get("sent_early", ""))),
    *(("GiB", peak), ("state GiB", lambda row: gib(row.extra.get("state_bytes")))),
    ("largest batch", lambda row: str(row.extra.get("largest_batch", ""))),
)
