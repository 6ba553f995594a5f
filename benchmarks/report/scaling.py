"""A MeanFlow step that several processes share."""

from collections.abc import Sequence

from benchmarks.report.case import MEANFLOW_STEP, Case
from benchmarks.report.drawing import Drawn, Series
from benchmarks.report.figures import dots
from benchmarks.report.reading import Measurement, Result
from benchmarks.report.tables import Cell, Judge, Table, conditions, number, one_each

PACKAGES = ("torch",)
GIB = 2**30


def tables(results: Sequence[Result], judge: Judge) -> list[Table]:
    """One a result: a row for each network, kind and number of processes."""

    def caption(result: Result) -> str:
        return f"A step of each process's own batch ({conditions(result)}); efficiency: one process's time over it."

    header = ("step", "processes", "ms", "p10", "p90", "efficiency", "GiB of state")
    return one_each(results, judge, PACKAGES, header, caption, _cells)


def _cells(row: Measurement) -> list[Cell]:
    efficiency, state = row.extra.get("efficiency"), row.extra.get("state_bytes")
    return [
        row.name,
        str(row.extra["processes"]),
        *(number(ms) for ms in (row.median, row.p10, row.p90)),
        f"{100 * efficiency:.1f} %" if efficiency else "",
        number(state / GIB, 3) if state else "",
    ]


def figures(results: Sequence[Result]) -> list[Drawn]:
    """Efficiency of several processes, a row for each network, share in the JVP and kind, a dot for each number."""
    made = []
    for place, result in enumerate(results):
        found: dict[int, dict[str, float]] = {}
        for row in result.rows:
            efficiency, processes = row.extra.get("efficiency"), row.extra["processes"]
            if efficiency is not None and processes > 1:
                found.setdefault(processes, {})[_name(row)] = 100 * efficiency
        if found:
            series = [Series(f"{processes} processes", values) for processes, values in sorted(found.items())]
            figure = dots(series, "percent of one process's speed, each", marks={"no loss": 100.0}, from_zero=False)
            of = f"{result.conditions.get('precision')}, {result.machine}"
            caption = f"Scaling of a step with each process's own batch: {of}."
            made.append(Drawn(f"meanflow-scaling-{place}", caption, figure, "Efficiency of a step by processes"))
    return made


def _name(row: Measurement) -> str:
    ratio, by = row.extra.get("ratio"), row.extra.get("transfers")
    share = "" if ratio is None else f", {100 * ratio:.0f} % in the JVP"
    return f"{row.extra['model']}{share}: {row.extra['kind']}{f', {by}' if by else ''}"


CASE = Case(
    name="meanflow-scaling",
    title="Steps of several processes",
    about="The same step by one process and by several, each on a GPU and a batch of its own.",
    paths=(
        *(f"benchmarks/cases/meanflow/scaling_{name}.py" for name in ("memory", "sets", "steps", "workers")),
        *MEANFLOW_STEP,
    ),
    packages=PACKAGES,
    tables=tables,
    figures=figures,
    # Of as large a batch as fits into memory; reading its state is not what bounds it.
    has_floor=lambda result: result.conditions.get("rows") != "memory",
)
