"""Attention of decode steps through block tables."""

from collections.abc import Sequence

from benchmarks.report.bounded import Bounded, bounded
from benchmarks.report.case import TIMING, Case, Finding, first_on_gpu
from benchmarks.report.drawing import Drawn
from benchmarks.report.reading import Measurement, Result
from benchmarks.report.tables import Cell, Judge, Table, conditions, number, one_each

PACKAGES = ("jax", "jaxlib")


def _way(row: Measurement) -> tuple[int, str]:
    """Rows of a step, and whose attention: of `batch 8: paged`."""
    batch, _, way = row.name.removeprefix("batch ").partition(": ")
    return int(batch), way


def share(row: Measurement) -> float:
    """Percent of the copy rate."""
    return 100 * float(row.extra["share_of_copy_rate"])


def headline(result: Result) -> Measurement:
    """The largest batch of the first way."""
    first = _way(result.rows[0])[1]
    return max((row for row in result.rows if _way(row)[1] == first), key=lambda row: _way(row)[0])


def finding(results: Sequence[Result]) -> Finding | None:
    """The headline of the first result on a GPU, else of the first."""
    result = first_on_gpu(results)
    batch, way = _way(headline(result))
    text = f"of the copy rate: attention of {batch} rows by the {way} kernels, {result.conditions.get('model')}"
    return Finding(f"{share(headline(result)):.0f} %", f"{text}, {result.machine}")


def tables(results: Sequence[Result], judge: Judge) -> list[Table]:
    """One a result: a row for each batch and way."""

    def caption(result: Result) -> str:
        return f"A call among many in a row, on one layer after the other ({conditions(result)})."

    header = ("rows", "kernels", "us", "bound us", "of the copy rate", "tokens of context")
    return one_each(results, judge, PACKAGES, header, caption, _cells, text=2)


def _cells(row: Measurement) -> list[Cell]:
    times = [number(1e3 * row.median), number(1e3 * row.floor)]
    return [*map(str, _way(row)), *times, f"{share(row):.0f} %", f"{row.extra['tokens']:,.0f}"]


def figures(results: Sequence[Result]) -> list[Drawn]:
    """Share of the copy rate by rows and kernels, one a result."""
    made = []
    for place, result in enumerate(results):
        ways: dict[str, dict[int, float]] = {}
        for row in result.rows:
            batch, way = _way(row)
            ways.setdefault(way, {})[batch] = share(row)
        series = [Bounded(way, values) for way, values in ways.items()]
        figure = bounded(series, "rows", "percent of the copy rate", marks={"a copy of as many bytes": 100.0})
        caption = (
            f"Attention of decode steps, share of the copy rate: {result.conditions.get('model')}, "
            f"{result.conditions.get('section')}, blocks of {result.conditions.get('block')}, {result.machine}."
        )
        made.append(Drawn(f"paged-attention-{place}", caption, figure, "Share of the copy rate by rows and kernels"))
    return made


CASE = Case(
    name="paged-attention",
    title="Paged attention",
    about="Attention of one token a row through block tables, bound by reading keys and values once.",
    paths=(
        "fullstride/llm/kernels",
        "benchmarks/cases/llm/attention.py",
        "benchmarks/cases/llm/attention_pallas.py",
        "benchmarks/cases/llm/attention_work.py",
        "benchmarks/cases/step_jax/ceilings.py",
        *TIMING,
    ),
    packages=PACKAGES,
    headline=headline,
    finding=finding,
    tables=tables,
    figures=figures,
)
