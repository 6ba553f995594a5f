"""Tables of an experiment's result."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.table import Table

from benchmarks.harness.seeds import ExperimentResult, PartResult, mean, seeds_in_words, spread
from benchmarks.harness.table import blank_table, console_of

# Columns that the tables need.
WIDTH = 150
SEEDS = "seeds"
VERDICTS = {True: "yes", False: "no", None: "not judged"}
# Below it a mean is what rounding leaves of zero.
LEAST = 1e-6


def mean_and_spread(values: list[float]) -> str:
    """Format a mean and spread, such as `0.0251 ±0.0012`, to the spread's second digit or the mean's fourth."""
    middle, deviation = mean(values), spread(values)
    if not deviation or abs(middle) < LEAST:
        return f"{middle:.4g}" + (f" ±{deviation:.2g}" if deviation else "")
    places = min(places_of(middle, 4), places_of(deviation, 2))
    return f"{middle:,.{places}f} ±{deviation:,.{places}f}"


def places_of(value: float, digits: int) -> int:
    """Return the number of decimals for a number of significant digits."""
    exponent = int(f"{value:.{digits - 1}e}".partition("e")[2])
    return max(digits - 1 - exponent, 0)


def number(value: float | None, digits: int = 4) -> str:
    """Format a number with significant digits and thousands separators; an exponent below 1e-6; nothing for None."""
    if value is None or value != value:
        return ""
    if value != 0 and abs(value) < LEAST:  # what rounding leaves of zero
        return f"{value:.1e}"
    rounded = float(f"{value:.{digits - 1}e}")  # which may have a digit more in front of the point
    if value == 0 or abs(rounded) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:.{places_of(rounded, digits)}f}"


@dataclass(frozen=True)
class Words:
    """Table of a part as text."""

    caption: str  # the question, and over which seeds its answer is
    text: tuple[str, ...]  # the first columns' names
    metrics: tuple[str, ...]  # the other columns' names
    rows: list[list[str]]  # their cells


def in_words(part: PartResult, cell: Callable[[list[float]], str] = mean_and_spread) -> Words:
    """One line a row; where rows are of different seeds, each names its own. `cell` writes the values of all seeds."""
    labels = tuple(dict.fromkeys(name for row in part.rows for name in row.labels))
    metrics = tuple(dict.fromkeys(name for row in part.rows for name, found in row.values.items() if found))
    of_seeds = {seeds_in_words(row.seeds) for row in part.rows if row.settings and row.seeds}
    named = (SEEDS,) * (len(of_seeds) > 1)
    rows = [
        [
            *(row.labels.get(name, "") for name in labels),
            *(", ".join(map(str, sorted(row.seeds))) if row.settings else "" for _ in named),
            *(cell(list(found.values())) if (found := row.values.get(name)) else "" for name in metrics),
        ]
        for row in part.rows
    ]
    several = any(len(row.seeds) > 1 for row in part.rows)
    over = ["Mean ± standard deviation" if several else "One run each", " or ".join(sorted(of_seeds))]
    return Words(f"{part.question} {', '.join(filter(None, over))}.", (*labels, *named), metrics, rows)


def tables(result: ExperimentResult) -> list[Table]:
    """Build a table for each part that has rows, then the claims."""
    found = []
    for part in (part for part in result.parts if part.rows):
        words = in_words(part)
        found.append(blank_table(part.title, (*words.text, *words.metrics), words.caption, left=len(words.text)))
        for row in words.rows:
            found[-1].add_row(*row)
    if result.claims:
        claims = Table("claim", "found", "holds", title="Claims", box=box.SIMPLE_HEAD, title_justify="left")
        for claim in result.claims:
            claims.add_row(claim.text, claim.found, VERDICTS[claim.holds])
        found.append(claims)
    return found


def show(result: ExperimentResult, path: Path) -> None:
    """Print a result's tables and what is missing from it."""
    console = console_of(WIDTH)
    for table in tables(result):
        console.print(table)
    for name, rates in result.ceilings.items():
        console.print(f"ceilings, {name}: {rates}", highlight=False, markup=False)
    for missing in result.missing:
        console.print(f"not run: {missing}", highlight=False, markup=False)
    console.print(f"written to {path}", highlight=False, soft_wrap=True)
