"""Lines beside bounds of their own: what was measured, and what the hardware would allow, in one colour."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import matplotlib
from matplotlib.figure import Figure

from benchmarks.report.drawing import COLOURS, STYLE, WIDTH, log_ticks, look, plain_ticks

DASHES = (0, (4, 3))


@dataclass(frozen=True)
class Bounded:
    """A line.

    Attributes:
        name: in the legend.
        values: by position.
        bound: what it cannot pass, by position; drawn dashed in the line's colour.

    """

    name: str
    values: Mapping[int, float]
    bound: Mapping[int, float] | None = None


def bounded(
    series: Sequence[Bounded],
    xlabel: str,
    ylabel: str,
    *,
    log_y: bool = False,
    marks: Mapping[str, float] | None = None,
) -> Figure:
    """Lines over powers of two, with their bounds dashed; `marks` are horizontal lines, by what they are called."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 4.2), layout="constrained")
        axes = figure.add_subplot()
        for place, one in enumerate(series):
            looks = look(place)
            axes.plot(*_points(one.values), label=one.name, clip_on=False, markersize=5.5, **looks)
            if one.bound:
                axes.plot(*_points(one.bound), color=looks["color"], linewidth=1, linestyle=DASHES)
        for name, value in (marks or {}).items():
            axes.axhline(value, color=COLOURS["ink"], linewidth=1, linestyle=DASHES, label=name)
        axes.set(xlabel=xlabel, ylabel=ylabel)
        axes.set_xscale("log", base=2)
        places = sorted({x for one in series for x in one.values})
        axes.set_xticks(places, [f"{x:,.10g}" for x in places])
        axes.set_xticks([], minor=True)
        if log_y:
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(log_ticks(*axes.get_ylim()))
        else:
            axes.set_ylim(bottom=0)
        plain_ticks(axes.yaxis)
        axes.grid(linewidth=0.6)
        figure.legend(loc="outside upper left", ncols=2, frameon=False, handletextpad=0.4, fontsize=9)
    return figure


def _points(values: Mapping[int, float]) -> tuple[list[int], list[float]]:
    ordered = sorted(values)
    return ordered, [values[x] for x in ordered]
