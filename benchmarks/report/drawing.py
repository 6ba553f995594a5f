"""What all figures share: colours of the page, type that reads on a phone and in the dark, SVG to be inlined."""

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from fullstride.runs.atomic_files import replace_file

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
    "six": "#b3125f",
    "seven": "#006d77",
}
SERIES = ("one", "two", "three", "four", "five", "six", "seven")
MARKERS = ("o", "D", "s", "^", "v", "P", "X")
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


def blank(height: float) -> tuple[Figure, Axes]:
    """A figure of one plot, so many inches high."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.add_subplot()


def legend(figure: Figure, names: Sequence[str]) -> None:
    """The legend above the plot, in two columns where its names are short."""
    columns = 2 if max(map(len, names)) <= LONGEST_OF_TWO else 1
    # Named one by one, as matplotlib leaves out what begins with an underscore, which a run's name may.
    drawn = {artist.get_label(): artist for artist in figure.axes[0].get_children()}
    shown = {"loc": "outside upper left", "ncols": columns, "frameon": False, "handletextpad": 0.4, "fontsize": 9}
    figure.legend([drawn[name] for name in names], names, **shown)


def log_ticks(low: float, high: float) -> LogLocator:
    """Ticks of a logarithmic axis between these: each decade's 1, and more of them where there are few decades."""
    if high < 8 * low:
        return LogLocator(subs=(1, 1.5, 2, 3, 4, 5, 7))
    return LogLocator(subs=(1, 2, 5) if high < 300 * low else (1,))


def plain_ticks(axis: Any) -> None:
    """Numbers as they are written, at an axis's larger ticks alone."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axis.set_minor_formatter(NullFormatter())


def look(place: int, bound: bool = False) -> dict[str, Any]:
    """Colour and marker of the series at a place; where the colours begin anew each has another marker than before."""
    if bound:
        return {"color": COLOURS["ink"], "marker": "|"}
    again, first = divmod(place, len(SERIES))
    return {"color": COLOURS[SERIES[first]], "marker": MARKERS[(first + again) % len(MARKERS)]}


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
    replace_file(svg, drawn.svg.replace("<svg ", '<svg style="background: white" ', 1))
    drawn.figure.savefig(png, dpi=200)
    return svg, png
