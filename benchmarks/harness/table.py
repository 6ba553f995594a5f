"""A result as a table for people."""

from rich import box
from rich.table import Table

from benchmarks.harness.results import CaseResult, Row
from fullstride.measure.roofline import explained, marked

COLUMNS = ("ms", "median", "p10-p90", "bound", "x bound", "GiB", "first s")


def _cells(row: Row) -> tuple[str, ...]:
    t = row.timing
    peak = "" if t.peak_bytes is None else f"{t.peak_bytes / 2**30:.2f}"
    return (
        row.name,
        f"{t.median_ms:.2f}",
        f"{t.quantile(0.1):.4g}-{t.quantile(0.9):.4g}",
        f"{row.floor.ms:.2f}",
        marked(f"{row.over_floor:.2f}", row.over_floor),
        peak,
        f"{t.first_ms / 1e3:.1f}",
    )


def legend(result: CaseResult) -> str:
    """The rates that the roofline bounds follow from, and what it means if a time is below its bound."""
    below = explained(row.over_floor for row in result.rows)
    return f"roofline bounds at {result.ceilings}{below and chr(10)}{below}"


def result_table(result: CaseResult) -> Table:
    """One line a row: times, roofline bound and their ratio; what the bounds are made of as the caption."""
    conditions = ", ".join(f"{k} {v}" for k, v in result.conditions.items())
    table = Table(
        box=box.SIMPLE_HEAD,
        title=f"{result.case}: {conditions}",
        caption=legend(result),
        title_justify="left",
        caption_justify="left",
    )
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "ms" else "right", no_wrap=True)
    for row in result.rows:
        table.add_row(*_cells(row))
    return table
