"""Records a second of the loader alone."""

from collections.abc import Sequence

from benchmarks.report.case import TIMING, Case, Finding, first_on_gpu
from benchmarks.report.drawing import Drawn, Series
from benchmarks.report.figures import lines
from benchmarks.report.reading import Measurement, Result
from benchmarks.report.tables import Cell, Judge, Table, all_in_one, number, over_bound

PACKAGES = ("torch",)


def rate(row: Measurement) -> float:
    """Records a second."""
    return float(row.extra["records_per_second"])


def _kind(row: Measurement) -> str:
    return row.name.partition(",")[0]


def headline(result: Result) -> Measurement:
    """The fastest row of pictures, which must be decoded."""
    return max((row for row in result.rows if _kind(row) == "pictures"), key=rate, default=result.rows[0])


def finding(results: Sequence[Result]) -> Finding | None:
    """The headline of the first result on a GPU's machine, else of the first."""
    result = first_on_gpu(results)
    row = headline(result)
    return Finding(number(rate(row)), f"records a second by the loader alone: {row.name}, {result.machine}")


def tables(results: Sequence[Result], judge: Judge) -> list[Table]:
    """Every row of every result."""
    header = ("records", "workers", "records/s", "median ms", "bound ms", "x bound")
    caption = (
        "The loader alone in an endless stream, batches of the conditions' size; ms are those of a round of batches."
    )
    return all_in_one(results, judge, PACKAGES, header, caption, _cells)


def _cells(result: Result, row: Measurement) -> list[Cell]:
    numbers = [number(rate(row)), number(row.median), number(row.floor), over_bound(row)]
    return [_kind(row), str(row.extra["workers"]), *numbers]


def figures(results: Sequence[Result]) -> list[Drawn]:
    """Records a second by workers."""
    series: dict[str, dict[float, float]] = {}
    for result in results:
        for row in result.rows:
            series.setdefault(f"{_kind(row)}, {_beside(result)}", {})[row.extra["workers"]] = rate(row)
    scaled = [Series(name, values) for name, values in series.items() if len(values) > 1]
    if not scaled:
        return []
    figure = lines(scaled, "worker processes", "records a second (log)", log=True)
    caption = "Records a second by worker processes: JPEGs of 256x256 that are decoded, and moments of latents."
    return [Drawn("meanflow-loader", caption, figure, "Records a second of the loader by worker processes")]


def _beside(result: Result) -> str:
    return result.machine if result.data["device"] == "cpu" else f"{result.environment.get('cores')} cores, GPU"


CASE = Case(
    name="meanflow-loader",
    title="Loading data",
    about="What the loader brings to the device when nothing else runs: a step that takes longer never waits for it.",
    paths=(
        "fullstride/meanflow/data",
        "benchmarks/cases/meanflow/loader.py",
        "fullstride/step/torch/transfer/prefetch.py",
        *TIMING,
    ),
    packages=PACKAGES,
    headline=headline,
    finding=finding,
    tables=tables,
    figures=figures,
)
