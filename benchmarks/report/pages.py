"""Pages of cases as Markdown for the site: figures, and every row of every file."""

from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from benchmarks.harness.experiment_table import VERDICTS, in_words, mean_and_spread, number
from benchmarks.harness.seeds import Outcome, PartResult
from benchmarks.report.figures import FIGURES
from benchmarks.report.frame import Results, Source
from benchmarks.report.plots import Drawn, Series, lines
from benchmarks.report.staleness import CASES, command_of, state

# What contents that are not as expected end in.
WRONG = (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, NameError)
FIRST = ("row", "median", "p10", "p90", "bound", "by", "over", "peak_bytes", "why")
SHOWN = {"median": "median ms", "bound": "bound ms", "by": "bound by", "over": "x bound", "peak_bytes": "peak GiB"}
ORIGIN = ("case", "machine", "device", "commit", "date", "file", "metric", "what", "note")
ABOUT_ALL = {"index": "All", "measure-again": "Measure again"}  # pages of all cases
ELSEWHERE = ("left_out", "targets", "fits", "savings", "ready_seconds", "parameters")  # conditions that are no choices


def render(template: str, **values: Any) -> str:
    """Fill a template of this folder."""
    made = Environment(loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined, trim_blocks=True)
    made.filters |= {"html": html, "anchor": _anchor}
    return made.get_template(template).render(values)


def html(table: pd.DataFrame) -> str:
    """Return a table as HTML without empty columns."""
    kept = table.loc[:, [(table[column] != "").any() for column in table]]
    return f'<div class="results">{kept.to_html(index=False, border=0, justify="unset")}</div>'


def title_of(case: str) -> str:
    """Return the title of a case's page, its name if none is declared; or of a page of all cases."""
    return ABOUT_ALL.get(case) or CASES.get(case, {}).get("title", case)


def pages(results: Results) -> dict[str, str]:
    """Return the Markdown of every page by its name, those of all cases first."""
    cases: dict[str, list[dict[str, Any]]] = {}
    for source in results.sources.values():
        cases.setdefault(source.case, []).append(_section(source, results))
    cases = {case: cases[case] for case in sorted(cases, key=lambda case: [*CASES, case].index(case))}
    of_all = {name: render(f"{name}.md", cases=cases, unread=results.unread) for name in ABOUT_ALL}
    return {**of_all, **{case: _page(case, sections, results) for case, sections in cases.items()}}


def _anchor(file: str) -> str:
    return "".join(one if one.isalnum() else "-" for one in file.removesuffix(".json"))


def _page(case: str, sections: list[dict[str, Any]], results: Results) -> str:
    frame = results.frame.query("case == @case").dropna(axis=1, how="all")
    figures, wrong = list[Drawn](), list[str]()
    for place, figure in enumerate(FIGURES.get(case, ())):
        try:
            figures += figure.drawn(f"{case}-{place}", frame)
        except WRONG as error:
            wrong.append(f"A figure is not drawn, as rows are not as it expects: {error!r}")
    words = {"title": title_of(case), "about": CASES.get(case, {}).get("about", ""), "wrong": wrong}
    return render("case.md", **words, figures=figures, sections=sections)


def _section(source: Source, results: Results) -> dict[str, Any]:
    """Return a file's section of a page: text, tables by caption, and figures."""
    parts = source.name.removesuffix(".json").split("--")[:-1] or [source.name]
    label = f"{', '.join(parts).replace(',compile', ', compile')} ({source.machine.removeprefix('NVIDIA ')})"
    shown = {"source": source, "title": title_of(source.case), "label": label, "state": state(source)}
    took = source.recorded("seconds", float)
    shown |= {"again": command_of(source), "minutes": "" if took is None else f"{took / 60:.1f}"}
    shown |= {"command": source.recorded("command", str), "about": "", "figures": [], "pictures": [], "missing": []}
    try:
        if source.kind == "experiment":
            return shown | _experiment(source)
        if source.kind == "result":
            tables = {"Every row": _rows(results.of(source.name))}
            return shown | {"about": _told(source.data["conditions"]), "tables": tables}
        return shown | {"about": source.data.get("what", ""), "tables": _records(results.of(source.name))}
    except WRONG as error:
        return shown | {"about": f"Its contents are not as expected: {error!r}; measure it again.", "tables": {}}


def _told(conditions: dict[str, Any]) -> str:
    chosen = {key: value for key, value in conditions.items() if value not in ("", None, [], {})}
    told = {key: f"{len(v)} of them" if isinstance(v, list | dict) and len(v) > 6 else v for key, v in chosen.items()}
    return "; ".join(f"{key} {value}" for key, value in told.items() if key not in ELSEWHERE) + "."


def _cell(value: Any) -> str:
    return "" if value is None else number(value) if isinstance(value, float) else str(value)


def _rows(found: pd.DataFrame) -> pd.DataFrame:
    """Return a file's rows with times and other values of the case, without gate errors and conditions."""
    columns = [column for column in found if column not in ORIGIN and not column.startswith(("at_", "errors_"))]
    table: Any = found[sorted(columns, key=[*FIRST, *columns].index)].dropna(axis=1, how="all")
    if "peak_bytes" in table:
        table = table.assign(peak_bytes=table.peak_bytes.astype(float) / 2**30)
    return table.map(_cell).rename(columns={column: SHOWN.get(column, column.replace("_", " ")) for column in table})


def _records(found: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return records by the first name of their place; a single record becomes a row per number."""
    tables = {}
    for name, rows in found.groupby(found.path.str.split(", ").str[0], sort=False):
        table = rows.drop(columns=[column for column in ORIGIN if column in rows]).dropna(axis=1, how="all")
        table = table.T.reset_index().set_axis(["name", "value"], axis=1) if len(rows) == 1 else table
        tables[str(name) or "Its own facts"] = table.map(_cell)
    return tables


def _experiment(source: Source) -> dict[str, Any]:
    data = source.data
    tables = dict(_part(part) for part in data["parts"] if part["rows"])
    if claims := [(claim["text"], claim["found"], VERDICTS[claim["holds"]]) for claim in data["claims"]]:
        tables["What was to be checked"] = pd.DataFrame(claims, columns=["claim", "found", "holds"])
    figures = []
    for curve in data["curves"]:
        series = [Series(name, dict(points)) for name, points in curve["series"].items()]
        figure = lines(series, curve["xlabel"], curve["ylabel"], log_x=curve["log_x"], log_y=curve["log_y"])
        figures.append(Drawn(f"{_anchor(source.name)}-{curve['name']}", curve["caption"], figure))
    about = f"{data['about']} Conditions: {_told(data['conditions'])}"
    shown = {"about": about, "tables": tables, "figures": figures}
    return shown | {"pictures": data.get("pictures", []), "missing": data["missing"]}


def _part(part: dict[str, Any]) -> tuple[str, pd.DataFrame]:
    """Return the table of a part: a row per outcome, mean and standard deviation; differing seeds are named."""

    def cell(values: list[float]) -> str:
        if len(set(values)) == 1 and float(values[0]).is_integer():
            return f"{values[0]:,.0f}"
        return mean_and_spread(values) if len(values) > 1 else number(values[0])

    rows = [Outcome.of(row) for row in part["rows"]]
    words = in_words(PartResult(part["name"], part["title"], part["question"], rows), cell)
    caption = f"{part['title']}. {words.caption}".removesuffix(".")
    return caption, pd.DataFrame(words.rows, columns=[*words.text, *words.metrics])
