"""What calling an Equinox training step costs."""

from collections.abc import Sequence

from benchmarks.report.case import TIMING, Case, Finding
from benchmarks.report.drawing import Drawn, Series
from benchmarks.report.figures import dots
from benchmarks.report.reading import Measurement, Result
from benchmarks.report.tables import Cell, Judge, Table, conditions, number, one_each, origin_line, over_bound

PACKAGES = ("jax", "jaxlib", "equinox")
# Whose time is the host's: the device's floor says nothing of it.
HOST_SECTIONS = ("host", "leaves", "static")


def _of(results: Sequence[Result], section: str) -> list[Result]:
    return [result for result in results if result.conditions.get("section") == section]


def _called(result: Result) -> list[Measurement]:
    """The ways to call a step, without the parts of them that are timed alone."""
    return [row for row in result.rows if "over_flat" in row.extra]


def headline(result: Result) -> Measurement:
    """TrainStep's row, grouped if there is one."""
    ours = [row for row in result.rows if row.name.startswith("TrainStep")]
    return min(ours, key=lambda row: row.median, default=result.rows[0])


def finding(results: Sequence[Result]) -> Finding | None:
    """Host time of the first result of dispatch beside `filter_jit`'s, of a GPU's host if there is one."""
    for result in sorted(_of(results, "host"), key=lambda result: result.data["device"] == "cpu"):
        times = {row.name: row.median for row in result.rows}
        if "filter_jit" in times:
            ours = headline(result)
            text = f"of host time to call a step by {ours.name}; filter_jit takes {number(times['filter_jit'])} ms"
            return Finding(f"{number(ours.median, 3)} ms", f"{text}: {ours.extra['arrays']} arrays, {result.machine}")
    return None


def tables(results: Sequence[Result], judge: Judge) -> list[Table]:
    """Of dispatch, what an array adds, and whole steps: one a result."""
    return [
        *_host(_of(results, "host"), judge),
        *(_leaves(result, judge) for result in _of(results, "leaves")),
        *_step(_of(results, "step"), judge),
    ]


def _host(results: list[Result], judge: Judge) -> list[Table]:
    def cells(row: Measurement) -> list[Cell]:
        waits = [number(row.extra[key]["median_ms"]) for key in ("host", "ready")]
        return [row.name, number(row.median), *waits, number(row.extra["over_flat"]["ratio"], 3)]

    def caption(result: Result) -> str:
        return f"Host time of one call ({conditions(result)}); x flat list is the median of ratios, call by call."

    header = ("way", "processor time ms", "until it returned ms", "until the result ms", "x flat list")
    return one_each(results, judge, PACKAGES, header, caption, cells, _called)


def _leaves(result: Result, judge: Judge) -> Table:
    fits = result.conditions.get("fits", {})
    rows: list[list[Cell]] = [
        [name, number(fit["us_per_array"]), number(fit["ms_at_none"])] for name, fit in fits.items()
    ]
    caption = "Host time as a line in the number of arrays, through the medians of three sizes of tree."
    return Table(caption, ("way", "us an array", "ms at none"), rows, note=origin_line(result, judge, PACKAGES))


def _step(results: list[Result], judge: Judge) -> list[Table]:
    def cells(row: Measurement) -> list[Cell]:
        return [row.name, number(row.median), number(row.floor), over_bound(row), *_over_bare(row)]

    def caption(result: Result) -> str:
        return f"Whole training steps ({conditions(result)}); x bare is over the bare executable, round by round."

    header = ("way", "ms a step", "bound ms", "x bound", "x bare", "95 % interval")
    return one_each(results, judge, PACKAGES, header, caption, cells)


def _over_bare(row: Measurement) -> list[str]:
    found = row.extra.get("over_bare")
    return [number(found["ratio"]), " to ".join(number(end) for end in found["interval"])] if found else ["", ""]


def figures(results: Sequence[Result]) -> list[Drawn]:
    """Dispatch on the host, and whole steps over the bare executable."""
    return [*_host_figure(_of(results, "host")), *_step_figure(_of(results, "step"))]


def _host_figure(results: list[Result]) -> list[Drawn]:
    series = [Series(result.machine, {row.name: row.median for row in _called(result)}) for result in results]
    if not any(one.values for one in series):
        return []
    caption = (
        "Processor time of the host for calling one training step on a tree of BERT's shape, median; the step itself "
        "does next to nothing, so that the time is dispatch. A machine here is that of the JAX device."
    )
    figure = dots(series, "ms a call (log)", log=True)
    return [Drawn("train-step-host", caption, figure, "Host time of a call by way and machine")]


def _step_figure(results: list[Result]) -> list[Drawn]:
    series: dict[str, dict[str, float]] = {}
    for result in results:
        for row in result.rows:
            if over := row.extra.get("over_bare"):
                way, _, mode = row.name.rpartition(", ")
                name = f"{result.conditions.get('model')}, {mode}, {result.machine}"
                series.setdefault(name, {})[way] = over["ratio"]
    if not series:
        return []
    shown = [Series(name, values) for name, values in series.items()]
    figure = dots(shown, "x the bare executable's step", from_zero=False)
    caption = (
        "Whole training steps over those of the bare executable, medians of ratios round by round; the tables have "
        "their intervals, which are wide on a shared CPU."
    )
    return [Drawn("train-step-overhead", caption, figure, "Step time over the bare executable by way")]


CASE = Case(
    name="train-step",
    title="Calling an Equinox training step",
    about=(
        "The same step called in different ways. Host time is what Python and JAX take to hand a step to the device; "
        "where it is below the step's own time, the device never waits. The bound of host rows is the device's, "
        "so their multiple of it tells how little the device has to do, and nothing else."
    ),
    paths=(
        "fullstride/step/jax",
        "benchmarks/cases/step_jax",
        "benchmarks/cases/bert/workload.py",
        "fullstride/bert/model/attention.py",
        "fullstride/bert/data/batch.py",
        "fullstride/bert/model/head.py",
        "fullstride/bert/model/layers.py",
        "fullstride/bert/training/loss.py",
        "fullstride/bert/model/bert.py",
        "fullstride/measure/pairs.py",
        *TIMING,
    ),
    packages=PACKAGES,
    headline=headline,
    finding=finding,
    tables=tables,
    figures=figures,
    has_floor=lambda result: result.conditions.get("section") not in HOST_SECTIONS,
)
