"""Bar chart of the README: fullstride and its peers, in multiples of the roofline bound."""

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.figure import Figure

from benchmarks.report.frame import Results, read_results
from benchmarks.report.placed.headlines import HEADLINES
from benchmarks.report.plots import COLOURS, STYLE
from benchmarks.report.tables import number
from fullstride.runs.atomic_files import replace_file

HEIGHT = 0.36  # of a bar, of a row's 1


class Bar(NamedTuple):
    """Row of the chart; each value is a time or a rate."""

    label: str
    peer: str
    ours: float
    theirs: float
    bound: float
    unit: str

    def over(self, value: float) -> float:
        """Return a value as a multiple of the bound's time."""
        return value / self.bound if self.unit == "ms" else self.bound / value


Columns = Callable[[Any], tuple[float, float, float]]
# Label, peer, unit and columns (ours, the peer's, the bound's) of each row of the table.
ROWS: tuple[tuple[str, str, str, Columns], ...] = (
    ("attention and its JVP, 16,384 tokens", "jvp_flash_attention", "ms",
     lambda row: (row.ours_median, row.dual_median, row.ours_bound)),
    ("CIFAR-10 MeanFlow step, TF32", "py-meanflow", "ms",
     lambda row: (row.tf32_median, row.theirs_median, row.tf32_bound)),
    ("BERT-base step, bf16", "eqx.filter_jit, donated", "ms",
     lambda row: (row.ours_free_median_ms, row.donated_free_median_ms, row.ours_bound)),
    ("Qwen3-0.6B, 4 prompts", "vLLM", "tokens/s",
     lambda row: (row.ours_tokens_per_second, row.vllm_tokens_per_second, row.bound)),
    ("Qwen3-0.6B, 256 prompts", "vLLM", "tokens/s",
     lambda row: (row.ours_tokens_per_second, row.vllm_tokens_per_second, row.bound)),
)  # fmt: skip


def bars(results: Results) -> list[Bar]:
    """Return the chart's rows from the results behind the README's table."""
    rows = [block.frame(results).iloc[0] for block in HEADLINES]
    return [Bar(label, peer, *values(row), unit) for (label, peer, unit, values), row in zip(ROWS, rows, strict=True)]


def chart(results: Results) -> str:
    """Return the chart as SVG."""
    with matplotlib.rc_context(STYLE):
        figure = _drawn(bars(results))
        buffer = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(buffer, format="svg", metadata=nothing, facecolor="white")
    return buffer.getvalue()


def write_chart(folder: Path, file: Path, check: bool = False) -> list[Path]:
    """Write the chart of a folder of results, or only `check` it; return the file if it changed."""
    new = chart(read_results(folder))
    if file.exists() and words(file.read_text(encoding="utf-8")) == words(new):
        return []
    if not check:
        replace_file(file, new)
    return [file]


def words(svg: str) -> list[str]:
    """Return the texts of a chart; positions may differ in their last digits from machine to machine."""
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


def _drawn(rows: list[Bar]) -> Figure:
    figure = Figure(figsize=(7.6, 0.9 + 0.78 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    for place, row in enumerate(rows):
        sides = (("fullstride", row.ours, "one", -HEIGHT / 2), (row.peer, row.theirs, "grid", HEIGHT / 2))
        for name, value, colour, offset in sides:
            length = row.over(value)
            axes.barh(place + offset, length, HEIGHT, color=COLOURS[colour])
            axes.text(
                length + 0.08, place + offset, f"{name}: {number(value, 3)} {row.unit}", va="center", fontsize=8.5
            )
    axes.axvline(1, color=COLOURS["ink"], linewidth=1, linestyle=(0, (4, 3)))
    axes.text(1, -0.62, "roofline bound", ha="left", va="bottom", fontsize=8.5)
    axes.set(yticks=range(len(rows)), yticklabels=[row.label for row in rows], ylim=(len(rows) - 0.5, -0.6))
    axes.set(
        xlim=(0, 1.55 * max(row.over(row.theirs) for row in rows)),
        xlabel="multiple of the roofline bound; less is better",
    )
    axes.tick_params(axis="y", length=0, labelcolor=COLOURS["ink"])
    return figure
