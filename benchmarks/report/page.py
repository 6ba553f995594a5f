"""The page: one HTML file that needs nothing else, and the figures as files of their own."""

from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from benchmarks.report import experiments, overview
from benchmarks.report.case import Case, Finding
from benchmarks.report.drawing import Drawn, inline, write_files
from benchmarks.report.history import Freshness, History
from benchmarks.report.others import Shown, show
from benchmarks.report.reading import Folder, Result
from benchmarks.report.tables import ORIGIN, Judge, Table, all_rows, origin_line, without_empty
from fullstride import __version__
from fullstride.measure.roofline import IMPOSSIBLE, MARK
from fullstride.runs.atomic_files import replace_file

# What contents that are not as expected end in, an OSError where they are no picture.
WRONG = (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, OSError)


@dataclass(frozen=True)
class Section:
    """A case on the page."""

    case: Case
    tables: list[Table]
    figures: list[Drawn]
    finding: Finding | None
    details: list[tuple[Result, str, Table]]
    misunderstood: dict[str, str]


def _sections(folder: Folder, judge: Judge) -> list[Section]:
    by_case: dict[str, list[Result]] = {case.name: [] for case in overview.CASES}
    for result in folder.results:
        by_case.setdefault(result.case, []).append(result)
    return [_section(overview.case_of(name), results, judge) for name, results in by_case.items() if results]


def _section(case: Case, results: list[Result], judge: Judge) -> Section:
    details = [(result, origin_line(result, judge, ()), all_rows(result, case.has_floor(result))) for result in results]
    why: dict[str, str] = {}
    if _misunderstood(case, results, judge):  # by one of them, which are asked one by one
        why = {result.name: found for result in results if (found := _misunderstood(case, [result], judge))}
    known = [result for result in results if result.name not in why]
    if not known:
        return Section(case, [], [], None, details, why)
    return Section(case, case.tables(known, judge), case.figures(known), _finding(case, known), details, why)


def _finding(case: Case, results: list[Result]) -> Finding | None:
    """Of the newest whole result, where the case takes the first of several."""
    return case.finding(sorted(results, key=lambda result: result.standing, reverse=True))


def _misunderstood(case: Case, results: list[Result], judge: Judge) -> str | None:
    """Why overview, tables and figures of their case cannot have these results, whose rows are shown all the same."""
    try:
        for result in results:
            case.headline(result)
            case.has_floor(result)
        case.tables(results, judge)
        case.figures(results)
        _finding(case, results)
    except WRONG as error:
        return f"not in the overview, tables and figures of {case.name}, its rows are not as expected: {error!r}"
    return None


def _experiments(folder: Folder, judge: Judge) -> tuple[list[experiments.ShownExperiment], list[tuple[str, str]]]:
    """Those that can be shown, and why the others cannot."""
    shown, not_shown = [], []
    for source in folder.experiments:
        try:
            shown.append(experiments.show_experiment(source, judge))
        except WRONG as error:
            not_shown.append((source.name, f"its contents are not an experiment's: {error!r}; run it again"))
    return shown, not_shown


def _not_shown(folder: Folder, sections: list[Section], others: list[Shown]) -> list[tuple[str, str]]:
    """Files or parts of them that the page does not show, and why."""
    misunderstood = [item for section in sections for item in section.misunderstood.items()]
    parts = [(shown.source.name, f"lists of bare values: {'; '.join(shown.left)}") for shown in others if shown.left]
    empty = [(shown.source.name, "no record found in it") for shown in others if not shown.tables]
    return [*folder.unread, *misunderstood, *empty, *parts]


def environment() -> Environment:
    """Templates, and what they know of figures and cells."""
    made = Environment(loader=PackageLoader("benchmarks.report", "."), autoescape=True, undefined=StrictUndefined)
    made.tests["freshness"] = lambda value: isinstance(value, Freshness)
    made.filters["inline"] = lambda drawn: Markup(inline(drawn))
    made.filters["without_empty"] = without_empty
    made.globals["origin"] = ORIGIN
    return made


def render(folder: Folder, history: History) -> tuple[str, list[Drawn]]:
    """The page's text, and the figures on it."""
    judge = overview.judge_by(history)
    sections = _sections(folder, judge)
    results = [
        result for section in sections for result, _, _ in section.details if result.name not in section.misunderstood
    ]
    table = overview.table(results, judge)
    first = overview.figure(results)
    others = [show(source, judge) for source in folder.others]
    shown, not_understood = _experiments(folder, judge)
    templates = environment()
    text = templates.get_template("page.html").render(
        version=__version__,
        mark=MARK,
        impossible=IMPOSSIBLE,
        head=history.head,
        count=len(folder.results),
        style=Markup(templates.get_template("page.css").render()),
        table=table,
        figures=first,
        sections=sections,
        others=others,
        experiments=shown,
        not_shown=[*_not_shown(folder, sections, others), *not_understood],
        statuses=[judge(source).status for source in (*folder.results, *folder.experiments)],
        machines=sorted({source.machine for source in (*folder.results, *folder.experiments)}),
    )
    drawn = [figure for section in (*sections, *shown) for figure in section.figures]
    return text, [*first, *drawn]


def write_page(folder: Folder, history: History, out: Path) -> Path:
    """Write `index.html` and `figures/*.svg|png` under `out`; returns the page.

    Raises:
        OSError: if they cannot be written.

    """
    text, figures = render(folder, history)
    (out / "figures").mkdir(parents=True, exist_ok=True)
    for drawn in figures:
        write_files(drawn, out / "figures")
    page = out / "index.html"
    replace_file(page, text)
    return page
