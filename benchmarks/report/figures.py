"""Figures of the page: dots by label, lines over numbers, curves, grids of images."""

import textwrap
from collections.abc import Mapping, Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from benchmarks.report.drawing import (
    COLOURS,
    MARKED,
    STYLE,
    WIDTH,
    Series,
    blank,
    legend,
    log_ticks,
    look,
    plain_ticks,
)

# Characters that a row of dots has room for.
LABEL = 63


def dots(
    series: Sequence[Series],
    xlabel: str,
    log: bool = False,
    marks: Mapping[str, float] | None = None,
    joined: bool = False,
    notes: Mapping[str, str] | None = None,
    from_zero: bool = True,
) -> Figure:
    """Rows of dots, each row's label above it; `marks` are vertical lines, `joined` draws a line along each row.

    Rows are in the order in which labels first appear; `notes` are written at the right end of their rows. What is told
    apart by small differences needs no zero.
    """
    labels = list(dict.fromkeys(label for one in series for label in one.values))
    with matplotlib.rc_context(STYLE):
        figure, axes = blank(0.95 + 0.1 * len(series) + 0.36 * len(labels))
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
                **look(place, one.bound),
                s=55 if one.bound else 30,
                zorder=3,
            )
        for name, value in (marks or {}).items():
            axes.axvline(value, color=COLOURS["ink"], linewidth=1, linestyle=(0, (4, 3)), label=name, zorder=2)
        _finish(axes, len(labels), xlabel, log, from_zero)
        legend(figure, [*(one.name for one in series), *(marks or {})])
    return figure


def cut(label: str, room: int) -> str:
    """A label of at most so many characters; what is left out stands before the machine in its last brackets."""
    start = label.rfind(" (")
    end = label[start:] if start > 0 and len(label) - start <= room // 2 else ""
    return textwrap.shorten(label[: len(label) - len(end)], room - len(end), placeholder=" ...") + end


def _row(axes: Axes, row: int, label: str, note: str) -> None:
    """Its line, its label, cut where it would be in the note's way, and the note."""
    axes.axhline(row, color=COLOURS["grid"], linewidth=0.8, zorder=0)
    beside = axes.get_yaxis_transform()
    axes.text(
        0,
        row - 0.42,
        cut(label, LABEL - len(note)),
        transform=beside,
        va="center",
        fontsize=9,
        color=COLOURS["ink"],
    )
    axes.text(1, row - 0.42, note, transform=beside, va="center", ha="right", fontsize=9, color=COLOURS["muted"])


def _finish(axes: Axes, rows: int, xlabel: str, log: bool, from_zero: bool) -> None:
    axes.set_ylim(rows - 0.4, -0.85)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(xlabel)
    if log:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(log_ticks(*axes.get_xlim()))
    elif from_zero:
        axes.set_xlim(left=0)
    plain_ticks(axes.xaxis)
    axes.grid(axis="x", linewidth=0.6)


def lines(series: Sequence[Series], xlabel: str, ylabel: str, bound: Series | None = None, log: bool = False) -> Figure:
    """A line with markers for each series over numbers; `bound` is dashed; `log` takes base 2 across, 10 upwards."""
    with matplotlib.rc_context(STYLE):
        figure, axes = blank(4.2)
        for place, one in enumerate(series):
            axes.plot(
                list(one.values),
                list(one.values.values()),
                label=one.name,
                markersize=5.5,
                clip_on=False,
                **look(place),
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
        legend(figure, [one.name for one in (*series, *([bound] if bound else []))])
    return figure


def curves(series: Sequence[Series], xlabel: str, ylabel: str, log_x: bool = False, log_y: bool = False) -> Figure:
    """Lines over numbers of any distance, with markers where there are few of them."""
    with matplotlib.rc_context(STYLE):
        figure, axes = blank(3.6)
        for place, one in enumerate(series):
            chosen = look(place)
            if len(one.values) > MARKED:
                chosen = {"color": chosen["color"], "linewidth": 1.2}
            axes.plot(list(one.values), list(one.values.values()), label=one.name, markersize=5, **chosen)
        axes.set(xlabel=xlabel, ylabel=ylabel)
        for axis, log in ((axes.xaxis, log_x), (axes.yaxis, log_y)):
            if log:
                (axes.set_xscale if axis is axes.xaxis else axes.set_yscale)("log")
                axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            plain_ticks(axis)
        axes.grid(linewidth=0.6)
        legend(figure, [one.name for one in series])
    return figure


def grid(pixels: np.ndarray, rows: Sequence[str] = ()) -> Figure:
    """A picture, grey (h, w) or in colours (h, w, 3), each pixel as it is; its rows of images with their names."""
    height, width = pixels.shape[:2]
    with matplotlib.rc_context(STYLE):
        figure, axes = blank(WIDTH * height / width + 0.1)
        axes.imshow(pixels, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
        axes.spines[:].set_visible(False)
        axes.set_xticks([])
        places = [(place + 0.5) * height / len(rows) - 0.5 for place in range(len(rows))]
        axes.set_yticks(places, list(rows))
        axes.tick_params(length=0)
    return figure
