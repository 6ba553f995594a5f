"""Figures of pages: dots or bars by label, and lines over numbers, as SVG in the page's own colours."""

import io
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

# A page has values of its own for these names, and others where it is dark.
COLOURS = {
    "ink": "#1c2128", "muted": "#5b6570", "grid": "#d9dee4", "one": "#0a5fb4", "two": "#b54708", "three": "#187a46",
    "four": "#8a3b9c", "five": "#8a6a00", "six": "#b3125f", "seven": "#006d77",
}  # fmt: skip
SERIES = ("one", "two", "three", "four", "five", "six", "seven")
MARKERS = ("o", "D", "s", "^", "v", "P", "X")
WIDTH = 4.6  # inches: 331 points, so that text keeps its size on a phone
MARKED = 40  # points of a line that has markers
LONGEST_OF_TWO = 24  # characters of a name in a legend, so that two stand side by side
LABEL = 63  # characters that a row of dots has room for
DASHED: dict[str, Any] = {"linewidth": 1, "linestyle": (0, (4, 3))}
STYLE: dict[Any, Any] = {
    "text.parse_math": False, "svg.fonttype": "none", "svg.hashsalt": "fullstride", "font.size": 9.5,
    "text.color": COLOURS["ink"], "axes.labelcolor": COLOURS["ink"], "axes.edgecolor": COLOURS["muted"],
    "xtick.color": COLOURS["muted"], "ytick.color": COLOURS["muted"], "grid.color": COLOURS["grid"],
    "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True,
}  # fmt: skip


@dataclass(frozen=True)
class Series:
    """Series of values in one colour and one marker."""

    name: str
    values: Mapping[Any, float]  # by label for `dots` and `bars`, by position for `lines`
    bound: Mapping[Any, float] | bool = False  # of `lines` what they cannot pass, dashed; of others whether they are it


@dataclass(frozen=True)
class Drawn:
    """Drawn figure with its texts."""

    name: str  # of its names in the SVG
    caption: str
    figure: Figure

    def inline(self) -> str:
        """Return an SVG element for a page, with unique names and the page's colour variables."""
        text = as_svg(self.figure, transparent=True)
        text = text[text.index("<svg") :]
        text = re.sub(r"<style.*?</style>|<metadata.*?</metadata>", "", text, flags=re.DOTALL)
        text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{self.name}-", text)
        text = re.sub(r' (width|height)="[\d.]+pt"', "", text, count=2)
        for name, value in COLOURS.items():
            text = text.replace(value, f"var(--{name})")
        text = re.sub(r"\s*\n\s*", " ", text)  # a blank line would end a block of HTML in Markdown
        return text.replace("<svg ", f'<svg role="img" aria-label="{escape(self.caption)}" ', 1)


def as_svg(figure: Figure, **options: Any) -> str:
    """Return a figure as SVG without its time and tool, saved with these options."""
    nothing, buffer = dict.fromkeys(("Creator", "Date", "Format", "Type")), io.StringIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(buffer, format="svg", metadata=nothing, **options)
    return buffer.getvalue()


def look(place: int, bound: bool = False) -> dict[str, Any]:
    """Return colour and marker of a series; when colours repeat, the marker changes."""
    if bound:
        return {"color": COLOURS["ink"], "marker": "|"}
    again, first = divmod(place, len(SERIES))
    return {"color": COLOURS[SERIES[first]], "marker": MARKERS[(first + again) % len(MARKERS)]}


def cut(label: str, room: int = LABEL) -> str:
    """Shorten a label to a number of characters, cutting before the machine in its last brackets."""
    start = label.rfind(" (")
    end = label[start:] if start > 0 and len(label) - start <= room // 2 else ""
    return textwrap.shorten(label[: len(label) - len(end)], room - len(end), placeholder=" ...") + end


def dots(series: Sequence[Series], xlabel: str, log: bool = False, marks: Mapping[str, float] | None = None) -> Figure:
    """Draw rows of dots in the order of their labels' first appearance; `marks` are vertical lines.

    If one of the series is a bound, a line joins the dots of each row.
    """
    labels = list(dict.fromkeys(label for one in series for label in one.values))
    with matplotlib.rc_context(STYLE):
        figure, axes = blank(0.95 + 0.1 * len(series) + 0.36 * len(labels))
        for row, label in enumerate(labels):
            axes.axhline(row, color=COLOURS["grid"], linewidth=0.8, zorder=0)
            axes.text(0, row - 0.42, cut(label), transform=axes.get_yaxis_transform(), va="center", fontsize=9)
            values = [one.values[label] for one in series if label in one.values]
            if any(one.bound for one in series):
                axes.plot([min(values), max(values)], [row, row], color=COLOURS["muted"], linewidth=1.6, zorder=1)
        for place, one in enumerate(series):
            rows, looks = [labels.index(label) for label in one.values], look(place, bool(one.bound))
            axes.scatter([*one.values.values()], rows, label=one.name, s=55 if one.bound else 30, zorder=3, **looks)
        for name, value in (marks or {}).items():
            axes.axvline(value, color=COLOURS["ink"], label=name, zorder=2, **DASHED)
        axes.set(xlabel=xlabel, ylim=(len(labels) - 0.4, -0.85), yticks=[])
        axes.spines["left"].set_visible(False)
        if not log:
            axes.set_xlim(left=0)
        _ticks(axes, "x", log)
        axes.grid(axis="x", linewidth=0.6)
        _legend(figure, [*(one.name for one in series), *(marks or {})])
    return figure


def bars(series: Sequence[Series], xlabel: str) -> Figure:
    """Draw a row for each label in which the series' values follow one another; a bound is a mark in the row."""
    labels = list(dict.fromkeys(label for one in series for label in one.values))
    ends = dict.fromkeys(labels, 0.0)
    with matplotlib.rc_context(STYLE):
        figure, axes = blank(0.95 + 0.1 * len(series) + 0.52 * len(labels))
        for row, label in enumerate(labels):
            axes.text(0, row - 0.42, cut(label), transform=axes.get_yaxis_transform(), va="center", fontsize=9)
        for place, one in enumerate(series):
            rows, values = [labels.index(label) for label in one.values], [*one.values.values()]
            if one.bound:
                axes.scatter(values, rows, label=one.name, s=220, linewidth=2, zorder=3, **look(place, bound=True))
                continue
            starts = [ends[label] for label in one.values]
            colour = look(place)["color"]
            first, *_ = axes.barh(rows, values, 0.36, starts, color=colour, edgecolor="none", zorder=2)
            first.set_label(one.name)
            ends |= {label: ends[label] + value for label, value in one.values.items()}
        axes.set(xlabel=xlabel, ylim=(len(labels) - 0.6, -0.85), yticks=[])
        axes.spines["left"].set_visible(False)
        _ticks(axes, "x", log=False)
        axes.grid(axis="x", linewidth=0.6)
        _legend(figure, [one.name for one in series])
    return figure


def lines(
    series: Sequence[Series], xlabel: str, ylabel: str, *, log_x: bool = False, log_y: bool = False,
    marks: Mapping[str, float] | None = None,
) -> Figure:  # fmt: skip
    """Draw lines over numbers, with markers if there are few; `marks` are horizontal lines."""
    with matplotlib.rc_context(STYLE):
        figure, axes = blank(4.0)
        for place, one in enumerate(series):
            chosen = look(place) if len(one.values) <= MARKED else {"color": look(place)["color"], "linewidth": 1.2}
            axes.plot(*zip(*sorted(one.values.items()), strict=True), label=one.name, markersize=5, **chosen)
            if isinstance(one.bound, Mapping):
                axes.plot(*zip(*sorted(one.bound.items()), strict=True), color=chosen["color"], **DASHED)
        for name, value in (marks or {}).items():
            axes.axhline(value, color=COLOURS["ink"], label=name, **DASHED)
        axes.set(xlabel=xlabel, ylabel=ylabel)
        _ticks(axes, "x", log_x)
        _ticks(axes, "y", log_y)
        axes.grid(linewidth=0.6)
        _legend(figure, [*(one.name for one in series), *(marks or {})])
    return figure


def blank(height: float, width: float = WIDTH) -> tuple[Figure, Axes]:
    """Return a figure of one plot with a size in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def _legend(figure: Figure, names: Sequence[str]) -> None:
    """Draw the legend above the plot, in two columns if its names are short."""
    # Named one by one, as matplotlib leaves out what begins with an underscore, which a run's name may.
    drawn = {artist.get_label(): artist for artist in figure.axes[0].get_children()}
    shown = {"loc": "outside upper left", "frameon": False, "handletextpad": 0.4, "fontsize": 9}
    figure.legend([drawn[name] for name in names], names, ncols=1 + (max(map(len, names)) <= LONGEST_OF_TWO), **shown)


def _ticks(axes: Axes, which: str, log: bool) -> None:
    """Format numbers at an axis's major ticks only; fewer decades have more ticks in each."""
    axis = getattr(axes, f"{which}axis")
    if log:
        getattr(axes, f"set_{which}scale")("log")
        low, high = getattr(axes, f"get_{which}lim")()
        few, some = high < 8 * low, high < 300 * low
        axis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 4, 5, 7) if few else (1, 2, 5) if some else (1,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axis.set_minor_formatter(NullFormatter())
