"""The tables that the benches of `fullstride.jvp` print, and the file they write."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.cases.jvp.common import Entry, LeftOut, Setup, wrong_of
from benchmarks.cases.jvp.errors import Errors
from benchmarks.cases.jvp.timing import GRAPH_MS
from benchmarks.harness.environment import environment
from benchmarks.harness.results import CaseResult, Row
from benchmarks.harness.table import blank_table, legend, spread
from benchmarks.harness.table import finish as finish_case
from fullstride.measure.roofline import marked

WIDTH = 190  # of the tables
TEXT = ("size", "pass", "by")
COLUMNS = ("ms", "p10-p90", "MB", "x tensors")
LAST = ("bound", "x bound", "error", "eager's", "ratio")
Rates = dict[str, Callable[[Row], str]]  # a bench's own columns


def finish(case: str, setup: Setup, chosen: dict[str, Any], rates: Rates, parts: "Parts", out: Path) -> Path:
    """Print the tables, write the JSON and return its path.

    Raises:
        GateError: afterwards, if something of ours is wrong.
        ConfigError: likewise, if nothing was measured.

    """
    errors, entries = parts
    rows = [e for e in entries if isinstance(e, Row)]
    left_out = [vars(e) for e in entries if isinstance(e, LeftOut)]
    conditions = {"precision": setup.precision, "backend": setup.implementation, **chosen, "left_out": left_out}
    result = CaseResult(case, setup.device.type, conditions, flat(errors), setup.ceilings, rows, environment())

    def shown() -> Iterator[Table | str]:
        yield table(result, entries, rates)
        if errors:
            yield errors_table(errors)
        yield from (f"left out: {e.shape} {e.kind}, {e.who}: {e.why}" for e in entries if isinstance(e, LeftOut))

    return finish_case(result, out, shown, width=WIDTH, wrong=wrong_of(entries))


Parts = tuple[dict[str, Errors], list[Entry]]


def flat(errors: dict[str, Errors]) -> dict[str, float]:
    """As a gate's errors: `bf16 to, ours`."""
    return {
        f"{form} {name}, {who}": e
        for form, results in errors.items()
        for name, both in results.items()
        for who, e in both.items()
    }


def errors_table(errors: dict[str, Errors]) -> Table:
    """One line a result, ours and eager's error in each format."""
    title = "relative errors against fp64: ours (eager's, ours in eager's)"
    out = blank_table(title, ("", *errors))
    for name in next(iter(errors.values())):
        out.add_row(name, *(_pair(found[name]) for found in errors.values()))
    return out


def _pair(errors: dict[str, float]) -> str:
    if "eager" not in errors:
        return f"{errors['ours']:.1e}"
    return f"{errors['ours']:.1e} ({errors['eager']:.1e}, {_ratio(errors)})"


def _ratio(errors: dict[str, float]) -> str:
    return f"{errors['ours'] / errors['eager']:.2f}" if errors.get("eager") else ""


def table(result: CaseResult, entries: list[Entry], rates: Rates) -> Table:
    """One line an entry: time, memory, a case's own columns `rates`, roofline bound, errors; or why there is none."""
    conditions = ", ".join(f"{k} {v}" for k, v in result.conditions.items() if isinstance(v, str))
    graphs = (
        f"\ncalls of up to {GRAPH_MS:g} ms are replays of CUDA graphs, without host time, but * could not be captured"
    )
    caption = legend(result) + (graphs if result.device == "cuda" else "")
    out = blank_table(f"{result.case}: {conditions}", (*TEXT, *COLUMNS, *rates, *LAST), caption, left=len(TEXT))
    for entry in entries:
        out.add_row(*(_cells(entry, rates) if isinstance(entry, Row) else _blank(entry)))
    return out


def _blank(entry: LeftOut) -> tuple[str, ...]:
    short = entry.why if len(entry.why) <= 12 else "left out"
    return entry.shape, entry.kind, entry.who, short


def _cells(row: Row, rates: Rates) -> tuple[str, ...]:
    timing, x = row.timing, row.extra
    peak = timing.peak_bytes
    return (
        *(x[key] for key in ("shape", "kind", "who")),
        f"{'*' if _has_host_time(row) else ''}{timing.median_ms:.4g}",
        spread(row),
        "" if peak is None else f"{peak / 1e6:.1f}",
        "" if peak is None else f"{peak / x['tensor_bytes']:.2f}",
        *(rate(row) for rate in rates.values()),
        f"{row.floor.ms:.3g}",
        marked(f"{row.over_floor:.2f}", row.over_floor),
        *_worst(x["errors"]),
    )


def _has_host_time(row: Row) -> bool:
    on_gpu = row.timing.peak_bytes is not None
    return on_gpu and not row.extra["calls_in_graph"] and row.timing.median_ms <= GRAPH_MS


def _worst(errors: Errors) -> tuple[str, str, str]:
    """Of the results of a row the largest errors, and the largest ratio."""
    if not errors:
        return "", "", ""
    ours, eagers = ([e[who] for e in errors.values() if who in e] for who in ("ours", "eager"))
    ratio = max(filter(None, map(_ratio, errors.values())), key=float, default="")
    return f"{max(ours):.1e}", f"{max(eagers):.1e}" if eagers else "", ratio
