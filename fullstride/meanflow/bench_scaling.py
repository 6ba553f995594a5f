"""`fullstride bench meanflow-scaling`: whole training steps on one GPU beside those on several, in the same run.

Each GPU keeps its batch, so that n of them should make n times as many images a second: efficiency is the time of one
alone over that of each among n. What could keep it from 1 are the transfers of gradients; the time of one of as many
bytes, with nothing beside it, is told with each row.
"""

from dataclasses import replace
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch.cuda import nccl

from fullstride.bench.environment import environment
from fullstride.bench.floor import Floor
from fullstride.bench.gate import GateError
from fullstride.bench.results import CaseResult, Row, write_result
from fullstride.bench.session import NO_MEMORY, NO_TIME, Budget
from fullstride.bench.timing import Timing
from fullstride.device import resolve_device
from fullstride.errors import ConfigError
from fullstride.meanflow import memory
from fullstride.meanflow.bench_scaling_options import Options
from fullstride.meanflow.bench_scaling_steps import Measured
from fullstride.meanflow.bench_scaling_workers import Found, Job, run_sets, step_options
from fullstride.meanflow.bench_step_setup import Setup, make_setup

WIDTH = 150  # that no line of the table is cut short where the output is a file


def run(options: Options, out: Path) -> Path:
    """Measure, print the tables and write the JSON, whose path is returned.

    Raises:
        ConfigError: if the device is not there, or has too few GPUs.
        GateError: if a step is wrong or cannot be run; the rest is measured and written before.

    """
    device = resolve_device(options.device)
    size, budget = _size(options, device), Budget.of(options.seconds)
    options = replace(options, device=device.type, largest=options.largest if device.type == "cuda" else "")
    setups = {model: make_setup(step_options(options, model)) for model in options.models}
    jobs = [
        Job(model, ratio, (setup.ceilings, setup.forward_flops))
        for model, setup in setups.items()
        for ratio in options.ratios
    ]
    for setup in setups.values():
        setup.model.cpu()  # the memory is the processes'
    memory.release(device)
    found = run_sets(jobs, options, size, budget)
    if options.largest and not budget.spent:
        # It takes what memory there is: nothing may stay beside it.
        found += run_sets([Job(options.largest)], options, size, budget)
    rows = [row for each in found for row in _rows(each, setups, options)]
    result = _result(rows, found, setups, options, size)
    path = write_result(result, out)
    console = Console()
    console.width = max(console.width, WIDTH)
    console.print(table(result))
    for each in found:
        if each.why:
            console.print(f"left out: {each.job.name}: {each.why}", highlight=False, markup=False)
    console.print(f"written to {path}")
    if wrong := [f"{each.job.name}: {each.why}" for each in found if each.why not in ("", NO_TIME, NO_MEMORY)]:
        raise GateError("; ".join(wrong))
    return path


def _size(options: Options, device: torch.device) -> int:
    there = torch.cuda.device_count() if device.type == "cuda" else 2
    if options.processes > there and device.type == "cuda":
        raise ConfigError(f"--processes={options.processes}: expected at most {there}, as there are GPUs")
    return options.processes or there


def _rows(found: Found, setups: dict[str, Setup], options: Options) -> list[Row]:
    """Of a set's findings; the first, of one process alone, is what the others are compared with."""
    rows = []
    for measured in found.rows:
        timing = Timing(measured.first_ms, measured.samples_ms, measured.peak_bytes)
        beside = f"{measured.count} process{'es' * (measured.count > 1)}"
        name = f"{found.job.name}, {beside}{f', {measured.kind}' * (measured.count > 1)}"
        extra = {"model": found.job.model, "ratio": found.job.ratio, "processes": measured.count, "kind": measured.kind}
        alone = found.rows[0]
        if found.job.ratio is not None:
            extra |= {"efficiency": _median(alone) / timing.median_ms, "batch": options.batch_size}
        rows.append(Row(name, timing, _floor(found.job, measured, setups), extra | measured.extra))
    return rows


def _median(measured: Measured) -> float:
    return Timing(0.0, measured.samples_ms, None).median_ms


def _floor(job: Job, measured: Measured, setups: dict[str, Setup]) -> Floor:
    """Of one process's arithmetic, and of its part of the weights' bytes: AdamW's 7 times, averages twice each."""
    if job.ratio is None:
        setup = next(iter(setups.values()))
        return Floor(0.0, 1e3 * measured.extra["state_bytes"] / setup.ceilings.bytes)
    setup = setups[job.model]
    parts = measured.count if measured.kind == "fsdp" else 1
    passes = 3 + (8 + 2 * setup.options.averages) / parts
    return setup.floor(3 + job.ratio, passes, setup.options.batch_size)


def _result(rows: list[Row], found: list[Found], setups: dict[str, Setup], options: Options, size: int) -> CaseResult:
    setup = next(iter(setups.values()))
    cuda = options.device == "cuda"
    conditions = {
        "model": ",".join(options.models),
        "precision": options.precision,
        "backend": options.backend if cuda else "eager",
        "batch_size": options.batch_size,
        "averages": options.averages,
        "processes": size,
        **({"largest": options.largest} if options.largest else {}),
        "parameters": {model: sum(p.numel() for p in own.model.parameters()) for model, own in setups.items()},
        **({"nccl": ".".join(map(str, nccl.version()))} if cuda else {}),
        "left_out": [{"name": each.job.name, "why": each.why} for each in found if each.why],
    }
    errors = {f"{each.job.name}, {kind}": error for each in found for kind, error in each.errors.items()}
    return CaseResult("meanflow-scaling", options.device, conditions, errors, setup.ceilings, rows, environment())


def table(result: CaseResult) -> Table:
    """A line a row."""
    shown = Table(box=box.SIMPLE_HEAD, title=f"{result.case}: {result.conditions['precision']}", title_justify="left")
    shown.add_column("step", no_wrap=True)
    for column in ("ms", "p10-p90", "efficiency", "transfer ms", "early", "GiB", "state GiB", "largest batch"):
        shown.add_column(column, justify="right", no_wrap=True)
    for row in result.rows:
        shown.add_row(row.name, *_cells(row))
    return shown


def _cells(row: Row) -> list[str]:
    t, extra = row.timing, row.extra
    gib = lambda value: "" if value is None else f"{value / memory.GIB:.2f}"  # noqa: E731
    return [
        f"{t.median_ms:.2f}",
        f"{t.quantile(0.1):.4g}-{t.quantile(0.9):.4g}",
        f"{extra['efficiency']:.1%}" if "efficiency" in extra else "",
        f"{extra['transfer_ms']:.2f}" if "transfer_ms" in extra else "",
        str(extra.get("sent_early", "")),
        gib(t.peak_bytes),
        gib(extra.get("state_bytes")),
        str(extra.get("largest_batch", "")),
    ]
