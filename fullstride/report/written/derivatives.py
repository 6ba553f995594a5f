"""The tables of the documentation about ops with forward derivatives, each number out of `benchmarks/results/`."""

from collections.abc import Callable, Mapping
from statistics import fmean
from typing import Any

from fullstride.report.jvp import LEAST_BYTES, share, tflops
from fullstride.report.markdown import MarkdownTable, the_file, the_result, the_row
from fullstride.report.reading import Folder, Measurement, Result
from fullstride.report.tables import beside, number

KINDS = ("forward", "detached", "through")
# Shapes of models, by the names that their rows begin with; the others are odd sizes and a sweep of lengths.
SHAPES = ("long128", "long64", "dit", "unet80")
PEERS = (("forward", "vanilla"), *(("detached", who) for who in ("cudnn", "flash", "vanilla")), ("through", "vanilla"))
# Of a copy's rate, in percent: forward, and either way back.
LEAST = {"forward": 80.0, "detached": 70.0, "through": 70.0}
# Whose times without a tangent stand beside each other.
STILL = ("fullstride", "cuDNN", "flash")


def attention(folder: Folder) -> MarkdownTable:
    """Attention with its derivative beside PyTorch's, in milliseconds."""
    result = of_jvp(folder, "attention")
    past = tuple(f"past the tangent: {who}" for who in ("ours", "cuDNN", "flash", "math"))
    table = MarkdownTable(("ms", "forward: ours", "forward: math", *past, "through it: ours", "through it: math"))
    for name in dict.fromkeys(row.extra["shape"] for row in result.rows):
        if name.split()[0] not in SHAPES:
            continue
        ours = {kind: the_row(result, f"{name} {kind}, ours") for kind in KINDS}
        theirs = {peer: _peer(result, name, *peer) for peer in PEERS}
        table.add(
            name.partition(" ")[2],
            *(_rated(ours["forward"]), theirs["forward", "vanilla"]),
            *(number(ours["detached"].median), *(theirs["detached", who] for who in ("cudnn", "flash", "vanilla"))),
            *(_rated(ours["through"]), theirs["through", "vanilla"]),
            of=result,
        )
    return table


def norms(folder: Folder) -> MarkdownTable:
    """Norms with their derivatives: shares of a copy's rate, in bold where they miss the target, and eager's time."""
    result = of_jvp(folder, "norms")
    table = MarkdownTable(("% of a copy's rate", "forward", "past the tangent", "through it", "PyTorch's ops: x ours"))
    shapes = dict.fromkeys(row.extra["shape"] for row in result.rows if row.extra["bytes"] >= LEAST_BYTES)
    for name in shapes:
        ours, theirs = ([the_row(result, f"{name} {kind}, {who}") for kind in KINDS] for who in ("ours", "eager"))
        over = (number(slow.median / fast.median, 2) for slow, fast in zip(theirs, ours, strict=True))
        shares = (_share(row, LEAST[kind]) for kind, row in zip(KINDS, ours, strict=True))
        table.add(name, *shares, " / ".join(over), of=result)
    return table


def low_scores(folder: Folder) -> MarkdownTable:
    """Gradients of attention without a tangent: what cuDNN loses where all scores are low, and everyone's time."""
    source = the_file(folder, "attention-low-scores")
    times: dict[tuple[int, ...], dict[str, float]] = {}
    for row in source.data["times"]:
        shape = tuple(row[name] for name in ("batch", "heads", "length", "head_dim"))
        times.setdefault(shape, {})[row["who"]] = 1e3 * fmean(one["median"] for one in row["ms"])
    lost = (f"rows of q's gradient that are NaN by {who}" for who in ("cuDNN", "fullstride"))
    table = MarkdownTable(("batch, heads, length, head dim", *(f"{who}, µs" for who in STILL), *lost))
    for shape, took in times.items():
        cells = [number(took[who], 3) for who in STILL]
        cells += [_lost(source.data["rows"], who, *shape[2:]) for who in ("cuDNN", "fullstride")]
        table.add(", ".join(map(str, shape)), *cells, of=source)
    return table


def _lost(rows: list[dict[str, Any]], who: str, length: int, head_dim: int) -> str:
    """Of the lowest scores that were tried."""
    asked = {"who": who, "length": length, "head_dim": head_dim}
    lowest = min((row for row in rows if asked.items() <= row.items()), key=lambda row: row["score"])
    return f"{lowest['rows_not_finite']['q']:,} of {lowest['rows']:,}"


def of_jvp(folder: Folder, op: str) -> Result:
    """The newest result of all shapes of `attention` or `norms`.

    Raises:
        ConfigError: if there is none.

    """
    return the_result(folder, f"jvp-{op}", precision="bf16", device="cuda", at="all")


def _rated(row: Measurement) -> str:
    """Milliseconds, and TFLOP/s."""
    return f"{number(row.median)} ({tflops(row):.0f} TFLOP/s)"


def _peer(result: Result, shape: str, kind: str, who: str) -> str:
    """A peer's milliseconds, or why it did not run."""
    for left in result.conditions["left_out"]:
        if (left["shape"], left["kind"], left["who"]) == (shape, kind, who):
            return left["why"]
    return number(the_row(result, f"{shape} {kind}, {who}").median)


def _share(row: Measurement, least: float) -> str:
    percent = 100 * share(row)
    shown = beside(percent, least)
    return f"**{shown}**" if percent < least else shown


TABLES: Mapping[str, Callable[[Folder], MarkdownTable]] = {
    "jvp-attention": attention,
    "jvp-norms": norms,
    "low-scores": low_scores,
}
