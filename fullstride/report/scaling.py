"""A MeanFlow step that several processes share."""

from collections.abc import Sequence

from fullstride.report.bounded import Bounded, bounded
from fullstride.report.case import TIMING, Case
from fullstride.report.drawing import Drawn
from fullstride.report.reading import Measurement, Result
from fullstride.report.tables import Cell, Judge, Table, conditions, number, one_each

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
    """Efficiency by processes, a line for each network, share in the JVP and kind."""
    made = []
    for place, result in enumerate(results):
        lines: dict[str, dict[int, float]] = {}
        for row in result.rows:
            if (efficiency := row.extra.get("efficiency")) is not None:
                by = [row.extra["kind"], *filter(None, [row.extra.get("transfers")])]
                kind = f" {', '.join(by)}" if row.extra["processes"] > 1 else ""
                lines.setdefault(_line(row, kind), {})[row.extra["processes"]] = 100 * efficiency
        if series := [Bounded(name, values) for name, values in _joined(lines).items() if len(values) > 1]:
            figure = bounded(series, "processes", "percent of one process's speed, each", marks={"no loss": 100.0})
            of = f"{result.conditions.get('precision')}, {result.machine}"
            caption = f"Scaling of a step with each process's own batch: {of}."
            made.append(Drawn(f"meanflow-scaling-{place}", caption, figure, "Efficiency of a step by processes"))
    return made


def _line(row: Measurement, kind: str) -> str:
    ratio = row.extra.get("ratio")
    return f"{row.extra['model']}, {100 * ratio:.0f} % in the JVP{kind}" if ratio else f"{row.extra['model']}{kind}"


def _joined(lines: dict[str, dict[int, float]]) -> dict[str, dict[int, float]]:
    """Each kind with the one process that it is compared with."""
    alone = {name: values for name, values in lines.items() if set(values) == {1}}
    return {
        name: {x: y for start, own in alone.items() if name.startswith(start) for x, y in own.items()} | values
        for name, values in lines.items()
        if name not in alone
    }


CASE = Case(
    name="meanflow-scaling",
    title="Steps of several processes",
    about="The same step by one process and by several, each on a GPU and a batch of its own.",
    paths=("fullstride/step/torch", "fullstride/meanflow/objective.py", "fullstride/meanflow/models", *TIMING),
    packages=PACKAGES,
    tables=tables,
    figures=figures,
)
