"""Tables as data: text, numbers as they are written, and where each row comes from."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.harness.experiment_table import places_of
from benchmarks.report.history import Freshness
from benchmarks.report.reading import UNKNOWN, Measurement, Result, Source
from fullstride.measure.roofline import marked

Cell = str | Freshness
# Of every row whose table holds several files.
ORIGIN = ("measured on", "versions", "commit", "date", "status")
# Conditions that are no choices: what was found, and what is told apart.
ELSEWHERE = ("left_out", "targets", "fits", "ready_seconds", "parameters")
Judge = Callable[[Source], Freshness]


@dataclass(frozen=True)
class Table:
    """Rows of one width.

    Attributes:
        caption: what they are, with conditions.
        header: the columns' names.
        rows: their cells.
        text: how many columns from the left are text; the others are numbers, and `ORIGIN` text again.
        note: where all rows come from, if from one file.

    """

    caption: str
    header: tuple[str, ...]
    rows: list[list[Cell]]
    text: int = 1
    note: str = ""


def without_empty(table: Table) -> Table:
    """The table without columns in which nothing is written."""
    kept = [i for i in range(len(table.header)) if i == 0 or any(row[i] != "" for row in table.rows) or not table.rows]
    return replace(
        table,
        header=tuple(table.header[i] for i in kept),
        rows=[[row[i] for i in kept] for row in table.rows],
        text=sum(i < table.text for i in kept),
    )


def number(value: float | None, digits: int = 4) -> str:
    """A number in so many significant digits, thousands apart; with an exponent below 1e-6; nothing for None."""
    if value is None:
        return ""
    if value != 0 and abs(value) < 1e-6:  # what rounding leaves of zero
        return f"{value:.1e}"
    rounded = float(f"{value:.{digits - 1}e}")  # which may have a digit more in front of the point
    if value == 0 or abs(rounded) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:.{places_of(rounded, digits)}f}"


def gib(size: int | None, places: int = 2) -> str:
    """Bytes as GiB; nothing where they are not known."""
    return "" if size is None else f"{size / 2**30:.{places}f}"


def megabytes(size: int | None) -> str:
    """Bytes in 10^6; nothing where they are not known."""
    return number(None if size is None else size / 1e6, 3)


def beside(value: float, limit: float, places: int = 0) -> str:
    """A number with as many decimals as it takes, `places` at least, to stand on its own side of a limit."""
    shown = f"{value:.{places}f}"
    if (value < limit) == (float(shown) < limit) or places > 9:
        return shown
    return beside(value, limit, places + 1)


def origin(source: Source, judge: Judge, packages: tuple[str, ...]) -> list[Cell]:
    """The cells under `ORIGIN`."""
    return [source.machine, source.versions(packages), source.commit_text, source.date, judge(source)]


def origin_line(source: Source, judge: Judge, packages: tuple[str, ...]) -> str:
    """The same in one line, for a table of one file; what is not recorded is named."""
    cells = [str(cell) for cell in origin(source, judge, packages)]
    missing = [name for name, cell in zip(ORIGIN, cells, strict=True) if cell == UNKNOWN]
    known = [cell for cell in cells if cell != UNKNOWN]
    return " · ".join([*known, f"not recorded: {', '.join(missing)}"] if missing else known)


def plain(value: object) -> str:
    """A condition as text: lists of more than six by their length, pairs with their names."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {plain(v)}" for key, v in value.items())
    if isinstance(value, list):
        return f"{len(value)} of them" if len(value) > 6 else ", ".join(plain(v) for v in value)
    if isinstance(value, float):
        shown = number(value)
        return shown.rstrip("0").rstrip(".") if "." in shown and "e" not in shown else shown
    return str(value)


def conditions(result: Result) -> str:
    """Every condition, in one line."""
    chosen = {key: value for key, value in result.conditions.items() if key not in ELSEWHERE}
    return "; ".join(f"{key} {plain(value)}" for key, value in chosen.items() if value not in ("", None, [], {}))


def left_out(result: Result) -> str:
    """What was not measured, and why."""
    told = result.conditions.get("left_out", [])
    found = [one if isinstance(one, str) else ", ".join(map(str, one.values())) for one in _listed(told)]
    return f" Left out: {'; '.join(found)}." if found else ""


def _listed(told: str | list[Any]) -> list[Any]:
    """Cases name one thing, or several, each with its reason or without."""
    return [told] if isinstance(told, str) else told


def over_bound(m: Measurement) -> str:
    """A time over its roofline bound, marked if it is below it."""
    return marked(number(m.over_floor, 3), m.over_floor)


def all_rows(result: Result, bounded: bool = True) -> Table:
    """Every row with its time and spread; with its roofline bound if that is of the same work."""
    rows: list[list[Cell]] = [_row(m, bounded) for m in result.rows]
    header = ("row", "median ms", "p10", "p90", "bound ms", "bound by", "x bound")
    by = f" By: {result.command}" if result.command else ""
    return Table(f"{conditions(result)}.{left_out(result)}{by}", header, rows)


def _row(m: Measurement, bounded: bool) -> list[Cell]:
    times = [number(value) for value in (m.median, m.p10, m.p90)]
    return [m.name, *times, *([number(m.floor), m.bound, over_bound(m)] if bounded else [""] * 3)]


def pivot(
    result: Result, columns: Sequence[tuple[str, str, str, Callable[[Measurement], str]]]
) -> tuple[tuple[str, ...], list[list[Cell]]]:
    """Header and rows, one a shape; each column is a name, a kind of pass, who runs it, and what to write of it.

    What did not run at any shape has no column.
    """
    found = {(m.extra.get("shape"), m.extra.get("kind"), m.extra.get("who")): m for m in result.rows}
    ran = {each[1:] for each in found}
    columns = [column for column in columns if column[1:3] in ran]
    shapes = dict.fromkeys(shape for shape, _, _ in found if shape is not None)
    rows: list[list[Cell]] = []
    for shape in shapes:
        taken = [(found.get((shape, kind, who)), write) for _, kind, who, write in columns]
        rows.append([str(shape), *(write(m) if m else "" for m, write in taken)])
    return ("shape", *(name for name, *_ in columns)), rows


def every_row(result: Result) -> Sequence[Measurement]:
    """All of them."""
    return result.rows


def one_each(
    results: Sequence[Result],
    judge: Judge,
    packages: tuple[str, ...],
    header: tuple[str, ...],
    caption: Callable[[Result], str],
    cells: Callable[[Measurement], list[Cell]],
    rows: Callable[[Result], Sequence[Measurement]] = every_row,
    text: int = 1,
) -> list[Table]:
    """A table for each result, whose origin is said once.

    Args:
        results: of a case.
        judge: of their freshness.
        packages: whose versions matter.
        header: the columns' names.
        caption: of a result's table.
        cells: of a row.
        rows: of a result that are shown.
        text: columns from the left that are text.

    """
    return [
        Table(caption(r), header, [cells(row) for row in rows(r)], text, origin_line(r, judge, packages))
        for r in results
    ]


def all_in_one(
    results: Sequence[Result],
    judge: Judge,
    packages: tuple[str, ...],
    header: tuple[str, ...],
    caption: str,
    cells: Callable[[Result, Measurement], list[Cell]],
    rows: Callable[[Result], Sequence[Measurement]] = every_row,
) -> list[Table]:
    """One table of all results, whose rows each say where they come from; two columns of text. None without rows."""
    found = [[*cells(r, row), *origin(r, judge, packages)] for r in results for row in rows(r)]
    return [Table(caption, (*header, *ORIGIN), found, text=2)] if found else []
