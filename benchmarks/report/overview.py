"""All results at one look: a row a file."""

from collections.abc import Sequence

from benchmarks.report import (
    experiments,
    hostile,
    jvp,
    llm,
    loader,
    meanflow_step,
    paged,
    peer,
    sampling,
    scaling,
    serving,
    train_step,
)
from benchmarks.report.case import Case
from benchmarks.report.drawing import Drawn, Series
from benchmarks.report.figures import dots
from benchmarks.report.history import History
from benchmarks.report.reading import Result, Source, marked
from benchmarks.report.tables import ORIGIN, Cell, Judge, Table, number, origin, over_bound, plain

CASES = (
    *(meanflow_step.CASE, peer.CASE, sampling.CASE, jvp.ATTENTION, jvp.NORMS, train_step.CASE),
    *(llm.CASE, serving.CASE, hostile.CASE, paged.CASE, loader.CASE, scaling.CASE),
)
# Of the conditions, what tells results of one case apart.
TELLING = ("model", "precision", "mode", "kernels", "batch_size", "step", "section")
WORDS = {"batch_size": "batch {}", "step": "{} step"}


def case_of(name: str) -> Case:
    """The case of that name; one that shows every row where the page knows no more."""
    return next((case for case in CASES if case.name == name), Case(name, name))


def paths_of(source: Source) -> tuple[str, ...]:
    """The code that a file's numbers depend on: its case's, its experiment's, or the whole package."""
    if isinstance(source, Result):
        return case_of(source.case).paths
    return experiments.paths_of(source) if "experiment" in source.data else Case(source.name, "").paths


def judge_by(history: History) -> Judge:
    """Whether the code of a file is what it measured."""
    return lambda source: history.freshness(source, paths_of(source))


def label(result: Result) -> str:
    """The case, and the conditions that tell the result apart from others of it."""
    chosen = {key: result.conditions[key] for key in TELLING if result.conditions.get(key) not in (None, "")}
    words = [WORDS.get(key, "{}").format(plain(value).replace(",", ", ")) for key, value in chosen.items()]
    return f"{result.case}: {', '.join(words)}"


def table(results: Sequence[Result], judge: Judge) -> Table:
    """A row a result: its headline beside the roofline bound, and where it comes from."""
    rows: list[list[Cell]] = []
    for result in results:
        case = case_of(result.case)
        m = case.headline(result)
        floor = [number(m.floor), over_bound(m)] if case.has_floor(result) else ["", ""]
        numbers = [number(m.median), *floor]
        rows.append([label(result), m.name, *numbers, *origin(result, judge, case.packages)])
    header = ("result", "headline row", "median ms", "bound ms", "x bound", *ORIGIN)
    caption = (
        "One row a file: the row that stands for it, its time, and its roofline bound; no bound where the "
        "time is the host's, or that of as much as fits into memory."
    )
    return Table(caption, header, rows, text=2)


def figure(results: Sequence[Result]) -> list[Drawn]:
    """Every headline's time beside its roofline bound; those of the host alone are left out."""
    chosen, mark = {}, marked(results)
    for result in results:
        if case_of(result.case).has_floor(result):
            name = f"{label(result)}{mark(result)}"
            names = (name, f"{name}, {result.date}", f"{name}, {result.name}")
            chosen[next(name for name in names if name not in chosen)] = case_of(result.case).headline(result)
    if not chosen:
        return []
    series = [
        Series("bound", {label: m.floor for label, m in chosen.items()}, bound=True),
        Series("measured", {label: m.median for label, m in chosen.items()}),
    ]
    notes = {label: f"{over_bound(m)} x" for label, m in chosen.items()}
    drawn = dots(series, "ms (log)", log=True, joined=True, notes=notes)
    caption = (
        "The headline of every result beside the time that its arithmetic or its bytes alone would take; the line "
        "between them is what there is to gain. Times that have no bound of their own are not here."
    )
    return [Drawn("overview", caption, drawn, "Time and roofline bound of the headline row of every result")]
