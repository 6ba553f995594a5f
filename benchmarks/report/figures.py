"""Figures of cases as `figures.toml` declares them: rows of the data frame, labels, and the number to draw."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.report import plots
from benchmarks.report.plots import Drawn, Series
from benchmarks.report.tables import fill


@dataclass(frozen=True)
class Figure:
    """Dots, bars or lines over a case's rows."""

    caption: str  # a template over the first row
    axes: Sequence[str]  # the axis's name of dots and bars, both of lines
    at: str  # of dots and bars a template of labels, of lines the column of positions
    values: Mapping[str, str]  # columns of numbers, by templates of what their series are called
    where: str = "metric == 'ms'"  # which rows, as pandas' `query` has it
    names: str = ""  # a pattern of rows' names whose groups become columns
    compute: Mapping[str, str] = field(default_factory=dict)  # columns that follow, as pandas' `eval` has it
    bound: str = ""  # the column of what the numbers cannot pass
    each: bool = False  # whether each file has a figure of its own
    stacked: bool = False  # whether a label's numbers are parts of a bar
    options: Mapping[str, Any] = field(default_factory=dict)  # of the plot

    def drawn(self, name: str, frame: pd.DataFrame) -> list[Drawn]:
        """Return the figures of a case's rows; none if there is nothing to draw."""
        if self.names:
            frame = frame.assign(**frame.row.str.extract(f"^{self.names}$"))
        found = frame.query(self.where)
        found = found.assign(machine=found.machine.str.removeprefix("NVIDIA "))
        found = found.assign(**{name: found.eval(text, engine="python") for name, text in self.compute.items()})
        if self.stacked and not any(column in found for column in self.values.values()):
            return []  # of what is measured on demand no file has any
        groups = [rows for _, rows in found.groupby("file", sort=False)] if self.each else [found]
        made = (self._figure(f"{name}-{place}", rows.to_dict("records")) for place, rows in enumerate(groups))
        return [one for one in made if one]

    def _figure(self, name: str, rows: list[dict[Any, Any]]) -> Drawn | None:
        dotted = len(self.axes) == 1
        series: dict[str, dict[Any, float]] = {}
        bounds: dict[str, dict[Any, float]] = {}
        for row in rows:
            at = fill(self.at, row) if dotted else row[self.at]
            for template, column in self.values.items():
                if row[column] == row[column]:
                    series.setdefault(told := fill(template, row), {})[at] = row[column]
                    if self.bound:
                        bounds.setdefault("bound" if dotted else told, {})[at] = row[self.bound]
        if not series or (not dotted and max(map(len, series.values())) < 2):
            return None
        shown = [Series(told, values, not dotted and bounds.get(told, False)) for told, values in series.items()]
        if self.stacked:
            shown = [one for one in shown if any(one.values.values())]
        shown += [Series("bound", bounds["bound"], bound=True)] if dotted and bounds else []
        plot: Any = plots.bars if self.stacked else plots.dots if dotted else plots.lines
        return Drawn(name, fill(self.caption, rows[0]), plot(shown, *self.axes, **self.options))


FIGURES: Mapping[str, tuple[Figure, ...]] = {
    case: tuple(Figure(**given) for given in figures)
    for case, figures in tomllib.loads(Path(__file__).with_name("figures.toml").read_text()).items()
}
