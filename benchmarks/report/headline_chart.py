"""Bar chart of the README: fullstride and its peers, in multiples of the roofline bound."""

import re
from pathlib import Path

import matplotlib
import numpy as np

from benchmarks.harness.experiment_table import number
from benchmarks.report.frame import Results, read_results
from benchmarks.report.placed.headlines import HEADLINES
from benchmarks.report.plots import COLOURS, DASHED, STYLE, as_svg, blank
from fullstride.runs.atomic_files import replace_file

HEIGHT = 0.36  # of a bar, of a row's 1
TOKENS = "ours_tokens_per_second", "vllm_tokens_per_second", "bound"
# Of each row of the README's table: label, peer, unit, and the columns of ours, the peer's and the bound.
ROWS = (
    ("attention and its JVP, 16,384 tokens", "jvp_flash_attention", "ms", ("ours_median", "dual_median", "ours_bound")),
    ("CIFAR-10 MeanFlow step, TF32", "py-meanflow", "ms", ("tf32_median", "theirs_median", "tf32_bound")),
    ("BERT-base step, bf16", "eqx.filter_jit, donated", "ms",
     ("ours_free_median_ms", "donated_free_median_ms", "ours_bound")),
    ("Qwen3-0.6B, 4 prompts", "vLLM", "tokens/s", TOKENS),
    ("Qwen3-0.6B, 256 prompts", "vLLM", "tokens/s", TOKENS),
)  # fmt: skip


def chart(results: Results) -> str:
    """Return the chart as SVG."""
    labels, peers, units, columns = zip(*ROWS, strict=True)
    found = zip(HEADLINES, columns, strict=True)
    values = np.array([block.frame(results).iloc[0][list(names)] for block, names in found], float)
    # A time over the bound's, and the bound's rate over a rate.
    ratios = np.where(np.array(units)[:, None] == "ms", values / values[:, 2:], values[:, 2:] / values)
    places = np.arange(len(ROWS))
    with matplotlib.rc_context(STYLE):
        figure, axes = blank(0.9 + 0.78 * len(ROWS), 7.6)
        for side, (names, colour) in enumerate(((["fullstride"] * len(ROWS), "one"), (peers, "grid"))):
            bars = axes.barh(places + (side - 0.5) * HEIGHT, ratios[:, side], HEIGHT, color=COLOURS[colour])
            every = zip(names, values[:, side], units, strict=True)
            told = [f"{name}: {number(value, 3)} {unit}" for name, value, unit in every]
            axes.bar_label(bars, told, padding=4, fontsize=8.5)
        axes.axvline(1, color=COLOURS["ink"], **DASHED)
        axes.text(1, -0.62, "roofline bound", ha="left", va="bottom", fontsize=8.5)
        axes.set(yticks=places, yticklabels=labels, ylim=(len(ROWS) - 0.5, -0.6), xlim=(0, 1.55 * ratios[:, 1].max()))
        axes.set_xlabel("multiple of the roofline bound; less is better")
        axes.tick_params(axis="y", length=0, labelcolor=COLOURS["ink"])
        return as_svg(figure, facecolor="white")


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
