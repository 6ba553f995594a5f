"""Tables of a result, and the end of a case: write, show, judge."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.harness.results import CaseResult, Row, write_result
from fullstride.measure.gate import GateError
from fullstride.measure.roofline import explained, marked

Columns = Sequence[tuple[str, Callable[[Row], str]]]  # names, and what they say of a row


def median(row: Row) -> str:
    """Return the median milliseconds."""
    return f"{row.timing.median_ms:.2f}"


def spread(row: Row) -> str:
    """Return the tenth and ninetieth percentile of a row's times."""
    return f"{row.timing.quantile(0.1):.4g}-{row.timing.quantile(0.9):.4g}"


def over_bound(row: Row) -> str:
    """Return the median divided by the roofline bound, marked if that is impossible."""
    return marked(f"{row.over_floor:.2f}", row.over_floor)


def peak(row: Row) -> str:
    """Return the peak memory in GiB; nothing if it is unknown."""
    return gib(row.timing.peak_bytes)


def gib(size: int | None) -> str:
    """Return bytes in GiB; nothing if they are unknown."""
    return "" if size is None else f"{size / 2**30:.2f}"


def first_call(row: Row) -> str:
    """Return the seconds of the first call."""
    return f"{row.timing.first_ms / 1e3:.1f}"


BOUND: Columns = (("bound", lambda row: f"{row.floor.ms:.2f}"), ("x bound", over_bound))
COLUMNS: Columns = (
    *(("ms", lambda row: row.name), ("median", median), ("p10-p90", spread), *BOUND),
    *(("GiB", peak), ("first s", first_call)),
)


def legend(result: CaseResult) -> str:
    """Return the rates behind the roofline bounds, and the meaning of a time below its bound."""
    below = explained(row.over_floor for row in result.rows)
    return f"roofline bounds at {result.ceilings}{below and chr(10)}{below}"


def result_table(result: CaseResult) -> Table:
    """Build the table of rows: times, roofline bound and their ratio, with the bounds' rates as caption."""
    conditions = ", ".join(f"{k} {v}" for k, v in result.conditions.items())
    return rows_table(f"{result.case}: {conditions}", COLUMNS, result.rows, legend(result))


def rows_table(title: str, columns: Columns, rows: Iterable[Row], caption: str | None = None) -> Table:
    """Build a table with a line per row."""
    table = blank_table(title, [name for name, _ in columns], caption)
    for row in rows:
        table.add_row(*(cell(row) for _, cell in columns))
    return table


def blank_table(title: str, columns: Iterable[str], caption: str | None = None, *, left: int = 1) -> Table:
    """Return a table without rows; its first `left` columns are text, the others numbers."""
    table = Table(box=box.SIMPLE_HEAD, title=title, caption=caption, title_justify="left", caption_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < left else "right", no_wrap=True)
    return table


def console_of(width: int) -> Console:
    """Return a console of at least this width, so that no line is cut when the output is a file."""
    console = Console()
    console.width = max(console.width, width)
    return console


def finish(
    result: CaseResult,
    out: Path,
    shown: Callable[[], Iterable[Table | str]],
    *,
    width: int,
    wrong: Sequence[str] = (),
    failed: Exception | None = None,
) -> Path:
    """Write a result, print it, and raise for what is wrong; neither can lose it.

    `wrong` are faults of this project, and `failed` is the error that ended the case. GateError afterwards, if
    something is wrong; ConfigError if there are no rows.
    """
    console = console_of(width)
    told = f"written to {write_result(result, out)}" if result.rows else "nothing was written"
    for each in (*shown(), told):
        console.print(each, highlight=isinstance(each, Table), markup=isinstance(each, Table), soft_wrap=each is told)
    if failed or wrong:
        raise failed or GateError("; ".join(wrong))
    if not result.rows:
        write_result(result, out)  # which says why
    return out / result.file_name
