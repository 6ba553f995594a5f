"""Figures that read on a phone and in the dark: matplotlib's SVG, inlined, its colours those of the page."""

import io
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

# The page's own names for them; a dark page gives other values to the same names.
COLOURS = {
    "ink": "#1c2128",
    "muted": "#5b6570",
    "grid": "#d9dee4",
    "one": "#0a5fb4",
    "two": "#b54708",
    "three": "#187a46",
    "four": "#8a3b9c",
    "five": "#8a6a00",
}
SERIES = ("one", "two", "three", "four", "five")
MARKERS = ("o", "D", "s", "^", "v")
WIDTH = 4.6  # inches: 331 points, so that text keeps its size on a phone
MARKED = 40  # points of a line that has markers
LONGEST_OF_TWO = 24  # characters of a name in a legend, so that two stand side by side
STYLE: dict[Any, Any] = {
    "text.parse_math": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "fullstride",
    "font.size": 9.5,
    "text.color": COLOURS["ink"],
    "axes.labelcolor": COLOURS["ink"],
    "axes.edgecolor": COLOURS["muted"],
    "xtick.color": COLOURS["muted"],
    "ytick.color": COLOURS["muted"],
    "grid.color": COLOURS["grid"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
}


@dataclass(frozen=True)
class Series:
    """Values by label, in one colour and one marker.

    Attributes:
        name: in the legend.
        values: by label for `dots`, by position for `lines`.
        bound: whether they are what the others are compared with, such as a floor.

    """

    name: str
    values: Mapping[Any, float]
    bound: bool = False


@dataclass(frozen=True)
class Drawn:
    """A figure and its words.

    Attributes:
        name: of its files and its SVG's names.
        caption: what it shows, under which conditions.
        figure: matplotlib's.
        alt: what it shows to who cannot see it.

    """

    name: str
    caption: str
    figure: Figure
    alt: str

    @cached_property
    def svg(self) -> str:
        """The SVG element, on nothing."""
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        buffer = io.StringIO()
        with matplotlib.rc_context(STYLE):
            self.figure.savefig(buffer, format="svg", metadata=nothing, transparent=True)
        return buffer.getvalue()[buffer.getvalue().index("<svg") :]


def _blank(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.add_subplot()


def _legend(figure: Figure, names: Sequence[str]) -> None:
    columns = 2 if max(map(len, names)) <= LONGEST_OF_TWO else 1
    figure.legend(loc="outside upper left", ncols=columns, frameon=False, handletextpad=0.4, fontsize=9)


def log_ticks(low: float, high: float) -> LogLocator:
    """Ticks of a logarithmic axis between these: each decade's 1, and 2 and 5 where there are few decades."""
    return LogLocator(subs=(1, 2, 5) if high < 300 * low else (1,))


def plain_ticks(axis: Any) -> None:
    """Numbers as they are written, at an axis's larger ticks alone."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axis.set_minor_formatter(NullFormatter())


def dots(
    series: Sequence[Series],
    xlabel: str,
    log: bool = False,
    marks: Mapping[str, float] | None = None,
    joined: bool = False,
    notes: Mapping[str, str] | None = None,
) -> Figure:
    """Rows of dots, each row's label above it; `marks` are vertical lines, `joined` draws a line along each row.

    Rows are in the order in which labels first appear; `notes` are written at the right end of their rows.
    """
    labels = list(dict.fromkeys(label for one in series for label in one.values))
    with matplotlib.rc_context(STYLE):
        figure, axes = _blank(0.95 + 0.1 * len(series) + 0.36 * len(labels))
        for row, label in enumerate(labels):
            _row(axes, row, label, (notes or {}).get(label, ""))
            values = [one.values[label] for one in series if label in one.values]
            if joined:
                axes.plot([min(values), max(values)], [row, row], color=COLOURS["muted"], linewidth=1.6, zorder=1)
        for place, one in enumerate(series):
            rows = [labels.index(label) for label in one.values]
            axes.scatter(
                list(one.values.values()),
                rows,
                label=one.name,
                **_look(place, one.bound),
                s=55 if one.bound else 30,
                zorder=3,
            )
        for name, value in (marks or {}).items():
            axes.axvline(value, color=COLOURS["ink"], linewidth=1, linestyle=(0, (4, 3)), label=name, zorder=2)
        _finish(axes, len(labels), xlabel, log)
        _legend(figure, [*(one.name for one in series), *(marks or {})])
    return figure


def _look(place: int, bound: bool = False) -> dict[str, Any]:
    if bound:
        return {"color": COLOURS["ink"], "marker": "|"}
    return {"color": COLOURS[SERIES[place % 5]], "marker": MARKERS[place % 5]}


def _row(axes: Axes, row: int, label: str, note: str) -> None:
    axes.axhline(row, color=COLOURS["grid"], linewidth=0.8, zorder=0)
    beside = axes.get_yaxis_transform()
    axes.text(
        0,
        row - 0.42,
        textwrap.shorten(label, 54, placeholder="..."),
        transform=beside,
        va="center",
        fontsize=9,
        color=COLOURS["ink"],
    )
    axes.text(1, row - 0.42, note, transform=beside, va="center", ha="right", fontsize=9, color=COLOURS["muted"])


def _finish(axes: Axes, rows: int, xlabel: str, log: bool) -> None:
    axes.set_ylim(rows - 0.4, -0.85)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(xlabel)
    if log:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(log_ticks(*axes.get_xlim()))
    else:
        axes.set_xlim(left=0)
    plain_ticks(axes.xaxis)
    axes.grid(axis="x", linewidth=0.6)


def lines(series: Sequence[Series], xlabel: str, ylabel: str, bound: Series | None = None, log: bool = False) -> Figure:
    """A line with markers for each series over numbers; `bound` is dashed; `log` takes base 2 across, 10 upwards."""
    with matplotlib.rc_context(STYLE):
        figure, axes = _blank(4.2)
        for place, one in enumerate(series):
            axes.plot(
                list(one.values),
                list(one.values.values()),
                label=one.name,
                markersize=5.5,
                clip_on=False,
                **_look(place),
            )
        if bound:
            xs, ys = list(bound.values), list(bound.values.values())
            axes.plot(xs, ys, color=COLOURS["ink"], linewidth=1, linestyle=(0, (4, 3)), label=bound.name)
        axes.set(xlabel=xlabel, ylabel=ylabel)
        if log:
            axes.set_yscale("log")
            axes.set_xscale("symlog", base=2, linthresh=1)
            axes.set_xlim(left=-0.2)
        axes.set_xticks(sorted({x for one in series for x in one.values}))
        plain_ticks(axes.xaxis)
        plain_ticks(axes.yaxis)
        axes.grid(linewidth=0.6)
        _legend(figure, [one.name for one in (*series, *([bound] if bound else []))])
    return figure


def curves(series: Sequence[Series], xlabel: str, ylabel: str, log_x: bool = False, log_y: bool = False) -> Figure:
    """Lines over numbers of any distance, with markers where there are few of them."""
    with matplotlib.rc_context(STYLE):
        figure, axes = _blank(3.6)
        for place, one in enumerate(series):
            look = (
                _look(place) if len(one.values) <= MARKED else {"color": COLOURS[SERIES[place % 5]], "linewidth": 1.2}
            )
            axes.plot(list(one.values), list(one.values.values()), label=one.name, markersize=5, **look)
        axes.set(xlabel=xlabel, ylabel=ylabel)
        for axis, log in ((axes.xaxis, log_x), (axes.yaxis, log_y)):
            if log:
                (axes.set_xscale if axis is axes.xaxis else axes.set_yscale)("log")
                axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            plain_ticks(axis)
        axes.grid(linewidth=0.6)
        _legend(figure, [one.name for one in series])
    return figure


def grid(pixels: np.ndarray) -> Figure:
    """A picture, grey (h, w) or in colours (h, w, 3), each pixel as it is."""
    height, width = pixels.shape[:2]
    with matplotlib.rc_context(STYLE):
        figure, axes = _blank(WIDTH * height / width + 0.1)
        axes.imshow(pixels, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
        axes.set_axis_off()
    return figure


def inline(drawn: Drawn) -> str:
    """The figure as an SVG element of the page: its own names, its colours the page's variables."""
    text = re.sub(r"<style.*?</style>", "", drawn.svg, flags=re.DOTALL)
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{drawn.name}-", text)
    text = re.sub(r' (width|height)="[\d.]+pt"', "", text, count=2)
    for name, value in COLOURS.items():
        text = text.replace(value, f"var(--{name})")
    return text.replace("<svg ", f'<svg role="img" aria-label="{escape(drawn.alt)}" ', 1)


def write_files(drawn: Drawn, folder: Path) -> tuple[Path, Path]:
    """Write `name.svg` and `name.png`, on white; returns both."""
    svg, png = folder / f"{drawn.name}.svg", folder / f"{drawn.name}.png"
    svg.write_text(drawn.svg.replace("<svg ", '<svg style="background: white" ', 1))
    drawn.figure.savefig(png, dpi=200)
    return svg, png
