"""Run of a benchmark of `fullstride.jvp`: checks, compilation ahead, rows, errors in every format, tables, JSON."""

import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from benchmarks.cases.jvp.common import (
    Entry,
    Errors,
    LeftOut,
    OpSetup,
    broken,
    by_format,
    make_setup,
    merged,
    wrong_of,
)  # fmt: skip
from benchmarks.cases.jvp.options import AttentionOptions, NormsOptions
from benchmarks.cases.jvp.timing import GRAPH_MS
from benchmarks.harness.budget import NO_TIME, one_stream, say
from benchmarks.harness.environment import environment
from benchmarks.harness.results import CaseResult, Row
from benchmarks.harness.table import blank_table, finish, legend, over_bound, spread
from fullstride.device.select import resolve_device
from fullstride.errors import one_of
from fullstride.jvp.implementation import chosen

TEXT = ("size", "pass", "by")
COLUMNS = ("ms", "p10-p90", "MB", "x tensors")
LAST = ("bound", "x bound", "error", "eager's", "ratio")
Rates = dict[str, Callable[[Row], str]]  # a bench's own columns


def compile_ahead(setup: OpSetup, jobs: int, calls: Iterable[Callable[[], Any]]) -> None:
    """Make the calls in `jobs` processes if that compiles anything; with fewer than 2, leave it to the benchmark."""
    if jobs >= 2 and chosen(setup.implementation, torch.empty(0, device=setup.device)) == "triton":
        start = time.monotonic()
        say(f"compiling, {jobs} at a time")
        in_processes(jobs, calls)
        say(f"compiled in {time.monotonic() - start:.0f} s")


def in_processes(jobs: int, calls: Iterable[Callable[[], Any]]) -> None:
    """Make the calls; ignore failures, because the benchmark repeats the call and reports them."""
    # A process with a GPU cannot be forked.
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        for done in [pool.submit(call) for call in calls]:
            done.exception()


def flat(errors: dict[str, Errors]) -> dict[str, float]:
    """Flatten errors into a gate's format, with keys such as `bf16 to, ours`."""
    return {
        f"{form} {name}, {who}": e
        for form, results in errors.items()
        for name, both in results.items()
        for who, e in both.items()
    }


def errors_table(errors: dict[str, Errors]) -> Table:
    """Build the table of errors: one line per result, ours and eager's in each format."""
    title = "relative errors against fp64: ours (eager's, ours in eager's)"
    out = blank_table(title, ("", *errors))
    for name in next(iter(errors.values())):
        pairs = [found[name] for found in errors.values()]
        beside = [f" ({pair['eager']:.1e}, {_ratio(pair)})" if "eager" in pair else "" for pair in pairs]
        out.add_row(name, *(f"{pair['ours']:.1e}{eager}" for pair, eager in zip(pairs, beside, strict=True)))
    return out


def _ratio(errors: dict[str, float]) -> str:
    return f"{errors['ours'] / errors['eager']:.2f}" if errors.get("eager") else ""


def table(result: CaseResult, entries: list[Entry], rates: Rates) -> Table:
    """Build the table of entries: time, memory, the case's own columns `rates`, roofline bound, errors."""
    conditions = ", ".join(f"{k} {v}" for k, v in result.conditions.items() if isinstance(v, str))
    graphs = (
        f"\ncalls of up to {GRAPH_MS:g} ms are replays of CUDA graphs, without host time, but * could not be captured"
    )
    caption = legend(result) + (graphs if result.device == "cuda" else "")
    out = blank_table(f"{result.case}: {conditions}", (*TEXT, *COLUMNS, *rates, *LAST), caption, left=len(TEXT))
    for entry in entries:
        if isinstance(entry, Row):
            out.add_row(*_cells(entry, rates))
        else:
            out.add_row(entry.shape, entry.kind, entry.who, entry.why if len(entry.why) <= 12 else "left out")
    return out


def _cells(row: Row, rates: Rates) -> tuple[str, ...]:
    timing, x = row.timing, row.extra
    peak = timing.peak_bytes
    with_host = peak is not None and not x["calls_in_graph"] and timing.median_ms <= GRAPH_MS
    # Take the largest errors and the largest ratio of the results.
    ours, eagers = ([e[who] for e in x["errors"].values() if who in e] for who in ("ours", "eager"))
    ratio = max(filter(None, map(_ratio, x["errors"].values())), key=float, default="")
    return (
        *(x[key] for key in ("shape", "kind", "who")),
        f"{'*' if with_host else ''}{timing.median_ms:.4g}",
        spread(row),
        "" if peak is None else f"{peak / 1e6:.1f}",
        "" if peak is None else f"{peak / x['tensor_bytes']:.2f}",
        *(rate(row) for rate in rates.values()),
        f"{row.floor.ms:.3g}",
        over_bound(row),
        *(f"{max(errors):.1e}" if errors else "" for errors in (ours, eagers)),
        ratio,
    )


@dataclass(frozen=True)
class OpsBench:
    """Description of a benchmark of one operator."""

    case: str  # its name in the results
    formats: tuple[str, ...]  # that it can be asked for
    shapes: Mapping[str, Sequence[Any]]  # lists of sizes, by name
    usual: Mapping[str, str]  # the name of the list that is measured unless one is given, by the kind of device
    small: Sequence[Any]  # sizes at which the errors of all formats are compared
    compile: Callable[[OpSetup, Any, str], None]  # the kernels of a size, `detached` or `through` its tangent
    rows: Callable[[OpSetup, Any], Iterable[Entry]]  # checks a size at once, and times it row by row
    gate: Callable[[OpSetup, Any], Errors]  # of a size, against fp64 in a setup's format
    rates: Rates  # columns of its own

    def kernels(self, setup: OpSetup, sizes: Sequence[Any]) -> list[partial[None]]:
        """Return calls that compile the kernels of the sizes and of the error table in all formats."""
        every = [(setup, size, kind) for size in sizes for kind in ("detached", "through")]
        every += [(replace(setup, precision=name), size, "through") for name in self.formats for size in self.small]
        return [partial(self.compile, *given) for given in every]

    def measured(self, setup: OpSetup, size: Any) -> list[Entry]:
        """Return the rows of a size; nothing is timed if the check fails."""
        if setup.budget.spent:
            return [LeftOut(str(size), "all", "all", NO_TIME)]
        say(f"gate: {size} against fp64")
        try:
            rows = self.rows(setup, size)
        except Exception as error:
            return [broken(str(size), "all", "ours", error)]
        return list(rows)

    def errors(self, setup: OpSetup) -> Errors:
        """Return the largest errors over the small sizes, in a setup's format."""
        return reduce(merged, (self.gate(setup, size) for size in self.small))

    def run(self, options: AttentionOptions | NormsOptions, out: Path) -> Path:
        """Check, measure, print the tables and write the JSON; return its path.

        ConfigError for a device, format or list that there is not. GateError if a result is wrong; the rest is measured
        and written before.
        """
        chosen = resolve_device(options.device)
        one_of("--precision", options.precision, self.formats)
        if (shapes := options.shapes) is not None:
            one_of("--shapes", shapes, self.shapes)
        sizes = list(self.shapes[shapes or self.usual[chosen.type]])
        with one_stream(chosen):
            setup = make_setup(chosen, options.precision, options.implementation, options.seconds)
            compile_ahead(setup, options.jobs, self.kernels(setup, sizes))
            measured = [entry for size in sizes for entry in self.measured(setup, size)]
            errors, left_out = by_format(setup, self.formats, self.errors)
        entries, another = [*measured, *left_out], shapes not in (None, self.usual[chosen.type])
        conditions = {
            "precision": setup.precision,
            "backend": setup.implementation,
            "shapes": list(map(str, sizes)),
            **({"at": shapes} if another else {}),
            "left_out": [vars(e) for e in entries if isinstance(e, LeftOut)],
        }
        rows = [e for e in entries if isinstance(e, Row)]
        result = CaseResult(self.case, chosen.type, conditions, flat(errors), setup.ceilings, rows, environment())

        def shown() -> Iterator[Table | str]:
            yield table(result, entries, self.rates)
            if errors:
                yield errors_table(errors)
            yield from (f"left out: {e.shape} {e.kind}, {e.who}: {e.why}" for e in entries if isinstance(e, LeftOut))

        return finish(result, out, shown, width=190, wrong=wrong_of(entries))
