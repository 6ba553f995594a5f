"""Means and standard deviations over seeds as cells of a table, and which of them is best by more than they vary."""

from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.harness.seeds import seeds_in_words

# Samplers, as an experiment's JSON names them.
ONE, TWO, EULER, FINE = "meanflow 1", "meanflow 2", "euler 16", "euler 50"
# As an experiment's JSON has it: `mean`, `spread` (None for a single seed) and `seeds`.
Metric = dict[str, Any]


def mean_and_spread(metric: Metric, form: str = ".4f", factor: float = 1.0) -> str:
    """As in `0.0612 ± 0.0018`; the mean alone where there is one value.

    Args:
        metric: of an experiment's row.
        form: of both numbers, as `format` takes it.
        factor: of both numbers, 100 for percent.

    """
    shown = f"{factor * metric['mean']:z{form}}"  # z: a floor may be a zero with a sign
    return shown if metric["spread"] is None else f"{shown} ± {factor * metric['spread']:{form}}"


def clearly_lowest(metrics: Sequence[Metric | None]) -> int | None:
    """The place of the lowest mean, if the next one is farther away than the larger standard deviation of the two.

    None if it is nearer, if there are not two, or if one of the two is of a single seed and has no deviation.
    """
    there = sorted((metric["mean"], i, metric["spread"]) for i, metric in enumerate(metrics) if metric is not None)
    if len(there) < 2 or any(spread is None for *_, spread in there[:2]):
        return None
    (low, place, spread), (following, _, other) = there[:2]
    return place if following - low > max(spread, other) else None


def compared(metrics: Sequence[Metric | None], form: str = ".4f") -> list[str]:
    """Cells of distances that compare, the `clearly_lowest` in bold; nothing where there is none."""
    cells = ["" if metric is None else mean_and_spread(metric, form) for metric in metrics]
    if (best := clearly_lowest(metrics)) is not None:
        cells[best] = f"**{cells[best]}**"
    return cells


def seeds_of(metrics: Iterable[Metric]) -> set[int]:
    """Those that any of them has a value of."""
    return {int(seed) for metric in metrics for seed in metric["seeds"]}


def of_seeds(cell: str, metric: Metric | None, usual: set[int]) -> str:
    """A cell, with its seeds where they are not the usual ones."""
    of = usual if metric is None else seeds_of([metric])
    return cell if of == usual else f"{cell} ({seeds_in_words(of)})"


def sampler_in_words(name: str) -> str:
    """`meanflow 2` as `two steps`, `euler 16` as `16 Euler steps`."""
    kind, _, steps = name.partition(" ")
    if kind == "meanflow":
        return {"1": "one step", "2": "two steps"}.get(steps, f"{steps} steps")
    return f"{steps} {kind.capitalize()} steps" if steps else kind
