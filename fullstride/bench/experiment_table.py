"""An experiment's result as tables for people."""

from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from fullstride.bench.experiments import ExperimentResult, Outcome, PartResult, mean, spread

# Columns that the tables need.
WIDTH = 150
SPREAD = "± is the standard deviation over {}."


def mean_and_spread(values: list[float]) -> str:
    """As in `0.0251 ±0.0012`; the mean alone where there is no spread."""
    deviation = spread(values)
    return f"{mean(values):.4g}" + (f" ±{deviation:.2g}" if deviation else "")


def _metrics(rows: list[Outcome]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name, found in row.values.items() if found))


def part_table(part: PartResult) -> Table:
    """One line a row."""
    seeds = {max(map(len, row.values.values())) for row in part.rows if row.settings}
    over = f"{' or '.join(map(str, sorted(seeds)))} seed{'' if seeds == {1} else 's'}"
    table = Table(
        title=part.title,
        caption=f"{part.question} {SPREAD.format(over)}",
        box=box.SIMPLE_HEAD,
        title_justify="left",
        caption_justify="left",
    )
    labels = list(dict.fromkeys(name for row in part.rows for name in row.labels))
    metrics = _metrics(part.rows)
    for name in (*labels, *metrics):
        table.add_column(name, justify="left" if name in labels else "right", no_wrap=name in labels)
    for row in part.rows:
        found = [list(row.values.get(name, {}).values()) for name in metrics]
        table.add_row(*(row.labels.get(name, "") for name in labels), *(mean_and_spread(v) if v else "" for v in found))
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
    for missing in result.missing:
        console.print(f"not run: {missing}", highlight=False, markup=False)
    console.print(f"written to {path}", highlight=False, soft_wrap=True)
