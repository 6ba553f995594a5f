"""Figures of a run as PNG: grids of images, generated next to real ones, and the loss curve.

A figure is laid out in pixels (at 72 dpi a point is one), so that the images keep their values exactly.
"""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, StrMethodFormatter
from torch import Tensor

from fullstride.meanflow.data.dataset import to_uint8

DPI = 72
MARGIN = 20
GAP = 4  # between images
CAPTION_GAP = 12  # between a caption and its row
TITLE = 44  # height of a line of titles
MIN_TILE = 48  # smaller images are enlarged to at least this
INK, QUIET, ACCENT, RULE = "#1f2933", "#8794a5", "#3454d1", "#e4e8ee"
CAPTION = FontProperties(family="DejaVu Sans", size=14)
HEADING = FontProperties(family="DejaVu Sans", size=18, weight="bold")

Pixels = np.ndarray  # uint8, (height, width, 3)


def _tile(images: Tensor, columns: int) -> Pixels:
    """The images side by side, row by row, each pixel enlarged to a square of one colour."""
    n, c, h, w = images.shape
    if n < 1 or c not in (1, 3):
        raise ValueError(f"images have shape {tuple(images.shape)}, expected (n, 1, h, w) or (n, 3, h, w), n >= 1")
    if columns < 1:
        raise ValueError(f"columns is {columns}, expected at least 1")
    if not images.isfinite().all():
        bad = (~images.isfinite()).flatten(1).any(1).nonzero()[:, 0].tolist()
        raise ValueError(f"images {bad[:8]} of {n} are not finite; the sampler or the network diverged")
    scale = math.ceil(MIN_TILE / max(h, w))
    pixels = to_uint8(images).expand(n, 3, h, w).permute(0, 2, 3, 1).numpy().repeat(scale, 1).repeat(scale, 2)
    columns, rows = min(columns, n), math.ceil(n / columns)
    h, w = h * scale + GAP, w * scale + GAP
    canvas = np.full((rows * h - GAP, columns * w - GAP, 3), 255, np.uint8)
    for i, tile in enumerate(pixels):
        y, x = i // columns * h, i % columns * w
        canvas[y : y + h - GAP, x : x + w - GAP] = tile
    return canvas


def _text(figure: Figure, x: float | int, y: float | int, text: str, font: FontProperties, ha: str = "left") -> None:
    """Text at (x, y) pixels from the top left, vertically centred there."""
    width, height = figure.get_size_inches() * DPI
    figure.text(x / width, 1 - y / height, text, fontproperties=font, ha=ha, va="center", color=INK)


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure).print_png(path)


def _text_width(text: str, font: FontProperties) -> int:
    """Width in pixels, with two of them to spare for the rounding of glyphs."""
    return math.ceil(TextPath((0, 0), text, prop=font).get_extents().width) + 2 if text.strip() else 0


def save_grid(
    images: Float[Tensor, "n c h w"],
    path: Path,
    *,
    columns: int,
    row_captions: Sequence[str] | None = None,
) -> None:
    """Write the images row by row, small ones enlarged by a whole factor.

    Args:
        images: grey or colour, values in [-1, 1]; others are shown as the nearest of them.
        path: path of the PNG; its folder is created.
        columns: images a row.
        row_captions: one for each row, written left of it.

    Raises:
        ValueError: for images that are not finite, none, or of other than 1 or 3 channels; for fewer than one column;
            for another number of captions than rows.

    """
    _save_panels([_tile(images, columns)], path, _checked(row_captions, math.ceil(len(images) / columns)))


def _checked(row_captions: Sequence[str] | None, rows: int) -> list[str]:
    captions = list(row_captions or [])
    if row_captions is not None and len(captions) != rows:
        raise ValueError(f"row_captions has {len(captions)} entries, expected one for each of the {rows} rows")
    return captions


def save_comparison(
    generated: Float[Tensor, "n c h w"],
    real: Float[Tensor, "m c h w"],
    path: Path,
    *,
    titles: tuple[str, str] = ("One-step samples", "Real images"),
    row_captions: Sequence[str] | None = None,
) -> None:
    """Write two square grids side by side, generated images left and as many real ones right, a title over each.

    Args:
        generated: grey or colour, values in [-1, 1].
        real: of the same shape.
        path: path of the PNG; its folder is created.
        titles: of both grids.
        row_captions: one for each row, written left of it in both grids.

    Raises:
        ValueError: if the two shapes differ, and whatever `save_grid` raises one for.

    """
    if generated.shape != real.shape:
        raise ValueError(
            f"generated has shape {tuple(generated.shape)} and real {tuple(real.shape)}, expected the same; "
            "pick as many real images as there are generated ones"
        )
    columns = max(1, math.ceil(math.sqrt(len(generated))))
    halves = [_tile(images, columns) for images in (generated, real)]
    _save_panels(halves, path, _checked(row_captions, math.ceil(len(generated) / columns)), titles)


def _save_panels(panels: list[Pixels], path: Path, captions: list[str], titles: Sequence[str] = ()) -> None:
    """Grids of one size side by side, with a title over each, if there are any, and the captions left of each."""
    height, tiles, _ = panels[0].shape
    text = max((_text_width(caption, CAPTION) for caption in captions), default=0)
    text += CAPTION_GAP if text else 0
    top = MARGIN + (TITLE if titles else 0)
    width = max(tiles, *(_text_width(title, HEADING) for title in titles)) if titles else tiles
    pitch = text + width + 2 * MARGIN
    canvas = np.full((top + height + MARGIN, len(panels) * pitch, 3), 255, np.uint8)
    lefts = [MARGIN + text + i * pitch for i in range(len(panels))]
    for left, panel in zip(lefts, panels, strict=True):
        canvas[top : top + height, left : left + tiles] = panel
    figure = Figure(figsize=(canvas.shape[1] / DPI, canvas.shape[0] / DPI), dpi=DPI)
    figure.figimage(canvas, origin="upper")
    rows = (height + GAP) / max(1, len(captions))
    for left, (row, caption) in itertools.product(lefts, enumerate(captions)):
        _text(figure, left - CAPTION_GAP, top + row * rows + (rows - GAP) / 2, caption, CAPTION, ha="right")
    for left, title in zip(lefts, titles, strict=False):
        _text(figure, left, MARGIN + TITLE / 2 - 6, title, HEADING)
    _save(figure, path)


def save_loss_curve(
    steps: Sequence[int], values: Sequence[float], path: Path, *, ylabel: str = "mean squared error"
) -> None:
    """Write values over optimizer steps: each as it was, and their running median where there are enough.

    The axis of values is logarithmic if all are positive and the largest is over ten times the smallest.

    Raises:
        ValueError: for no values, another number of steps, or values that are not finite.

    """
    x, y = np.asarray(steps, dtype=float), np.asarray(values, dtype=float)
    if not 0 < len(y) == len(x):
        raise ValueError(f"there are {len(x)} steps and {len(y)} values, expected as many of each and at least one")
    if not np.isfinite(y).all():
        first = int(np.flatnonzero(~np.isfinite(y))[0])
        raise ValueError(f"the value at step {x[first]:g} is {y[first]}, expected finite values; the run diverged")
    figure = Figure(figsize=(8, 4.5), dpi=150)
    figure.set_layout_engine("constrained", w_pad=0.2, h_pad=0.2)
    axes = figure.add_subplot()
    _draw_curve(axes, x, y)
    axes.set_title("Training loss", loc="left", size=14, weight="bold", color=INK, pad=12)
    axes.set_xlabel("optimizer step", color=INK)
    axes.set_ylabel(ylabel, color=INK)
    axes.grid(axis="y", color=RULE)
    axes.set_axisbelow(True)
    axes.margins(x=0.01)
    axes.tick_params(color=RULE, labelcolor=QUIET)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(RULE)
    _save(figure, path)


def _draw_curve(axes: Axes, x: np.ndarray, y: np.ndarray) -> None:
    smooth = len(y) >= 40
    # A single value makes no line, only a marker shows it.
    axes.plot(x, y, "" if len(y) > 1 else "o", color=ACCENT, alpha=0.3 if smooth else 1, lw=1 if smooth else 2)
    if smooth:
        # The median over a centred twentieth of the curve, narrower at its ends.
        reach = len(y) // 40
        medians = [np.median(y[max(0, i - reach) : i + reach + 1]) for i in range(len(y))]
        axes.plot(x, medians, color=ACCENT, lw=2.2)
    if y.min() > 0 and y.max() > 10 * y.min():
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True))
