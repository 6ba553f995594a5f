"""Images a second of MeanFlow's samplers."""

from collections.abc import Sequence

from benchmarks.report.case import TIMING, Case, Finding, first_on_gpu
from benchmarks.report.drawing import Drawn, Series
from benchmarks.report.figures import lines
from benchmarks.report.reading import Measurement, Result
from benchmarks.report.tables import Cell, Judge, Table, all_in_one, number, over_bound

PACKAGES = ("torch", "triton")


def rate(row: Measurement) -> float:
    """Images a second."""
    return float(row.extra["images_per_second"])


def is_set(row: Measurement) -> bool:
    """Whether images went from their indices to the host, as `meanflow sample` makes them."""
    return row.extra["num"] > row.extra["batch"]


def headline(result: Result) -> Measurement:
    """One step by the largest batch, as the last backend runs it."""
    ones = [row for row in result.rows if row.extra["steps"] == 1 and not is_set(row)]
    return max(ones, key=lambda row: row.extra["batch"] + ones.index(row) / len(ones))


def finding(results: Sequence[Result]) -> Finding | None:
    """The headline of the first result on a GPU, else of the first; of that machine's in bf16 where there is one."""
    result = first_on_gpu(results)
    same = [r for r in results if r.machine == result.machine]
    result = next((r for r in same if r.conditions["precision"] == "bf16"), result)
    row = headline(result)
    text = f"images a second by one network evaluation: {row.name}, {result.conditions['precision']}, {result.machine}"
    return Finding(number(rate(row)), text)


def tables(results: Sequence[Result], judge: Judge) -> list[Table]:
    """Every row of every result."""
    header = ("images", "network", "images/s", "median ms", "bound ms", "x bound")
    caption = "Images of one batch on the device, or of a set from their indices to the host."
    return all_in_one(results, judge, PACKAGES, header, caption, _cells)


def _cells(result: Result, row: Measurement) -> list[Cell]:
    numbers = [number(rate(row)), number(row.median), number(row.floor), over_bound(row)]
    return [row.name, f"{result.conditions['model']}, {result.conditions['precision']}", *numbers]


def figures(results: Sequence[Result]) -> list[Drawn]:
    """Images a second of one step by the batch, a line a way of running the network."""
    series: dict[str, dict[float, float]] = {}
    for result in results:
        for row in result.rows:
            if row.extra["steps"] == 1 and not is_set(row):
                name = f"{result.conditions['model']}, {result.conditions['precision']}, {row.extra['backend']}"
                series.setdefault(f"{name}, {result.machine}", {})[row.extra["batch"]] = rate(row)
    drawn = [Series(name, values) for name, values in series.items() if len(values) > 1]
    if not drawn:
        return []
    figure = lines(drawn, "images of a batch", "images a second (log)", log=True)
    caption = "Images a second by one MeanFlow step, by the images of a batch and how the network is run."
    return [Drawn("meanflow-sampling", caption, figure, "Images a second of one step by batch")]


CASE = Case(
    name="meanflow-sampling",
    title="Sampling",
    about="What images cost once a network is trained: an evaluation a step, and its bound as often.",
    paths=(
        "fullstride/meanflow/sampling/graphed.py",
        "fullstride/meanflow/sampling/samplers.py",
        "fullstride/meanflow/sampling/noise.py",
        "benchmarks/cases/meanflow/sampling_run.py",
        "benchmarks/cases/meanflow/step_setup.py",
        "fullstride/meanflow/models",
        "fullstride/jvp",
        "fullstride/device/cuda_graph.py",
        "fullstride/step/torch/transfer/prefetch.py",
        "fullstride/step/torch/transfer/to_host.py",
        *TIMING,
    ),
    packages=PACKAGES,
    headline=headline,
    finding=finding,
    tables=tables,
    figures=figures,
)
