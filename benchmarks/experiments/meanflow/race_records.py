"""What the runs of the comparison have written down, by seed."""

from collections.abc import Callable, Iterable
from typing import Any

from benchmarks.experiments.meanflow.race_asked import Asked
from benchmarks.experiments.meanflow.record import MARKS, best
from benchmarks.harness.seeds import mean

# By seed.
Records = dict[int, dict[str, Any]]
# `marks` or `moments` of a record, and which of them.
Place = tuple[str, int]
CLOCKS = {"seconds": "seconds of training", "with start-up": "seconds with start-up"}


def read_records(asked: Asked, code: str, seeds: tuple[int, ...]) -> Records:
    """Of a code's runs that have reached a mark.

    Raises:
        ConfigError: if one was run with other settings than are asked for.

    """
    records = {seed: best(asked.record(code, seed).values) for seed in seeds}
    return {seed: record for seed, record in records.items() if record["marks"]}


def completed(records: Records) -> Records:
    """Those that have reached all marks."""
    return {seed: record for seed, record in records.items() if len(record["marks"]) >= MARKS}


def comparable(records: Records) -> Records:
    """Those of which means by time are made: the complete ones if there are any, which one that was cut would cut."""
    return completed(records) or records


def over_seeds(records: Records, at: Place, value: Callable[[dict[str, Any]], float]) -> dict[int, float]:
    """A number of a mark or a moment, by seed."""
    kind, i = at
    return {seed: float(value(record[kind][i])) for seed, record in records.items() if i < len(record[kind])}


def places(records: Records, has: Callable[[Iterable[int]], int]) -> list[Place]:
    """The marks and the moments that `has`, any or all, of the seeds have reached."""
    return [(kind, i) for kind in ("marks", "moments") for i in range(has(len(r[kind]) for r in records.values()))]


def line(records: Records, metric: str, clock: str) -> list[tuple[float, float]]:
    """Mean over seeds at each mark and moment that all of them have, by time."""
    points = []
    for at in places(records, min):
        x = over_seeds(records, at, lambda m: m[clock])
        y = over_seeds(records, at, lambda m: m["scores"][metric])
        points.append((mean(list(x.values())), mean(list(y.values()))))
    return sorted(points)
