"""An experiment's result as tables for people."""

from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from fullstride.bench.experiments import ExperimentResult, Outcome, PartResult, mean, seeds_in_words, spread

# Columns that the tables need.
WIDTH = 150
SEEDS = "seeds"
# Below it a mean is what rounding leaves of zero.
LEAST = 1e-6


def mean_and_spread(values: list[float]) -> str:
    """As in `0.0251 ±0.0012`: up to the spread's second digit, four of the mean at most; it alone without a spread."""
    middle, deviation = mean(values), spread(values)
    if not deviation or abs(middle) < LEAST:
        return f"{middle:.4g}" + (f" ±{deviation:.2g}" if deviation else "")
    places = min(_places(middle, 4), _places(deviation, 2))
    return f"{middle:,.{places}f} ±{deviation:,.{places}f}"


def _places(value: float, digits: int) -> int:
    """Decimals of a number in so many significant digits."""
    exponent = int(f"{value:.{digits - 1}e}".partition("e")[2])
    return max(digits - 1 - exponent, 0)


def _metrics(rows: list[Outcome]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name, found in row.values.items() if found))


def part_table(part: PartResult) -> Table:
    """One line a row; where rows are of different seeds, each names its own."""
    of_seeds = {seeds_in_words(row.seeds) for row in part.rows if row.settings and row.seeds}
    several = any(len(row.seeds) > 1 for row in part.rows)
    over = f"{'Mean ± standard deviation' if several else 'One run each'}, {' or '.join(sorted(of_seeds))}."
    table = Table(
        title=part.title,
        caption=f"{part.question} {over}",
        box=box.SIMPLE_HEAD,
        title_justify="left",
        caption_justify="left",
    )
    labels = list(dict.fromkeys(name for row in part.rows for name in row.labels))
    metrics = _metrics(part.rows)
    for name in (*labels, *[SEEDS] * (len(of_seeds) > 1), *metrics):
        table.add_column(name, justify="right" if name in metrics else "left", no_wrap=name not in metrics)
    for row in part.rows:
        found = [list(row.values.get(name, {}).values()) for name in metrics]
        named = [", ".join(map(str, sorted(row.seeds))) if row.settings else ""] * (len(of_seeds) > 1)
        cells = (mean_and_spread(values) if values else "" for values in found)
        table.add_row(*(row.labels.get(name, "") for name in labels), *named, *cells)
    return table


def tables(result: ExperimentResult) -> list[Table]:
    """A table for each part that has rows, then the claims."""
    found = [part_table(part) for part in result.parts if part.rows]
    if result.claims:
        claims = Table("claim", "found", "holds", title="Claims", box=box.SIMPLE_HEAD, title_justify="left")
        for claim in result.claims:
            verdict = {True: "yes", False: "no", None: "not judged"}[claim.holds]
            claims.add_row(claim.text, claim.found, verdict)
        found.append(claims)
    return found


def show(result: ExperimentResult, path: Path) -> None:
    """Print a result's tables and what is missing of it."""
    console = Console(width=max(Console().width, WIDTH))
    for table in tables(result):
        console.print(table)
    for name, rates in result.ceilings.items():
        console.print(f"ceilings, {name}: {rates}", highlight=False, markup=False)
    for missing in result.missing:
        console.print(f"not run: {missing}", highlight=False, markup=False)
    console.print(f"written to {path}", highlight=False, soft_wrap=True)
