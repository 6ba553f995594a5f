"""The tables of the documentation about ops with forward derivatives, each number out of `benchmarks/results/`."""

from collections.abc import Callable, Mapping
from statistics import fmean
from typing import Any

from benchmarks.report.jvp import LEAST_BYTES
from benchmarks.report.jvp_columns import FUSED_DUAL, share, tflops
from benchmarks.report.markdown import MarkdownTable, the_file, the_result, the_results, the_row
from benchmarks.report.reading import Folder, Measurement, Result
from benchmarks.report.tables import beside, megabytes, number, over_bound

Passes = dict[tuple[str, str], Measurement]
KINDS = ("forward", "detached", "through")
ALL = {"precision": "bf16", "device": "cuda", "at": "all"}
# Shapes of models, by the names that their rows begin with; the others are odd sizes and a sweep of lengths.
SHAPES = ("long128", "long64", "dit", "unet80")
# Beside ours in each pass; the last ones where they ran.
PEERS = {"forward": ("vanilla",), "detached": ("cudnn", "flash", "vanilla"), "through": ("vanilla",)}
PASS = {"forward": "forward", "detached": "past the tangent", "through": "through it"}
NAMES = {"cudnn": "cuDNN", "flash": "flash", "vanilla": "math"}
FUSED = ("cudnn", "flash")
# Of a copy's rate, in percent: forward, and either way back.
LEAST = {"forward": 80.0, "detached": 70.0, "through": 70.0}
# Whose times without a tangent stand beside each other.
STILL = ("fullstride", "cuDNN", "flash")


def attention(folder: Folder) -> MarkdownTable:
    """Attention with its derivative beside PyTorch's and another's, in milliseconds."""
    result = newest_attention(folder)
    every = _shapes(result)
    ran = {kind for passes in every.values() for kind, who in passes if who == FUSED_DUAL}
    sides = {kind: ("ours", *whose, *([FUSED_DUAL] if kind in ran else [])) for kind, whose in PEERS.items()}
    table = MarkdownTable(("ms", *(f"{PASS[kind]}: {NAMES.get(who, who)}" for kind in sides for who in sides[kind])))
    for name in every:
        if name.split()[0] in SHAPES:
            cells = (_beside(result, name, kind, who) for kind in sides for who in sides[kind])
            table.add(name.partition(" ")[2], *cells, of=result)
    return table


def _beside(result: Result, name: str, kind: str, who: str) -> str:
    """Milliseconds, with the rate of ours where a tangent is in it; nothing of a size that another does not take."""
    if who == "ours":
        row = the_row(result, f"{name} {kind}, ours")
        return number(row.median) if kind == "detached" else _rated(row)
    if who == FUSED_DUAL and not any(row.name == f"{name} {kind}, {who}" for row in result.rows):
        return _left_out(result, name, kind, who) or ""
    return peer(result, name, kind, who)


def attention_sizes(folder: Folder) -> MarkdownTable:
    """Every size of attention: time, work and rate of both passes with the tangent, over those of a primal alone."""
    result = of_jvp(folder, "attention")
    what = ("ms", "math, ms", "GFLOP", "TFLOP/s", "x bound")
    each = (f"{PASS[kind]}: {one}" for kind in ("forward", "through") for one in what)
    table = MarkdownTable(("size", *each, "both: x the primal's"))
    for name, passes in _shapes(result).items():
        cells = [cell for kind in ("forward", "through") for cell in _worked(result, name, kind)]
        table.add(name, *cells, number(_over_primal(passes), 3), of=result)
    return table


def attention_memory(folder: Folder) -> MarkdownTable:
    """Every size of attention: the most memory at once, in MB, ours beside PyTorch's."""
    result = of_jvp(folder, "attention")
    sides = [(kind, who) for kind in ("forward", "through") for who in ("ours", "vanilla")]
    table = MarkdownTable(("MB", *(f"{PASS[kind]}: {NAMES.get(who, who)}" for kind, who in sides)))
    for name in _shapes(result):
        table.add(name, *(peer(result, name, *side, _megabytes) for side in sides), of=result)
    return table


def attention_slower(folder: Folder) -> MarkdownTable:
    """Every pass of attention in which one of PyTorch's own is faster."""
    result = of_jvp(folder, "attention")
    table = MarkdownTable(("size", "pass", "faster", "its ms", "our ms", "ours: x its"), text=3)
    for name, passes in _shapes(result).items():
        for (kind, who), its in passes.items():
            ours = passes.get((kind, "ours"))  # of a primal alone there is none
            if ours is not None and its.median < ours.median:
                times = (number(its.median), number(ours.median), number(ours.median / its.median, 3))
                table.add(name, PASS[kind], NAMES.get(who, who), *times, of=result)
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
    """The newest whole result of all shapes of `attention` or `norms`.

    Raises:
        ConfigError: if there is none.

    """
    return the_result(folder, f"jvp-{op}", **ALL)


def newest_attention(folder: Folder) -> Result:
    """As `of_jvp`, but for a newer one that its time ended: `SHAPES` are measured first."""
    return max(the_results(folder, "jvp-attention", **ALL), key=lambda result: result.moment)


def _shapes(result: Result) -> dict[str, Passes]:
    """The rows of each shape, by kind of pass and who runs it."""
    found: dict[str, Passes] = {}
    for row in result.rows:
        found.setdefault(row.extra["shape"], {})[row.extra["kind"], row.extra["who"]] = row
    return found


def _over_primal(passes: Passes) -> float | None:
    """Forward and backward with the tangent over both without, each by the library's fastest; None where none ran."""
    ours = sum(passes[kind, "ours"].median for kind in ("forward", "through"))
    theirs = [[passes[kind, who].median for who in FUSED if (kind, who) in passes] for kind in ("primal", "detached")]
    return ours / sum(map(min, theirs)) if all(theirs) else None


def _worked(result: Result, shape: str, kind: str) -> tuple[str, ...]:
    """Milliseconds of ours and of math attention, GFLOP, TFLOP/s, and the time over its roofline bound."""
    row = the_row(result, f"{shape} {kind}, ours")
    rates = (number(value, 3) for value in (row.extra["gflop"], tflops(row)))
    return number(row.median), peer(result, shape, kind, "vanilla"), *rates, over_bound(row)


def _ms(row: Measurement) -> str:
    return number(row.median)


def _megabytes(row: Measurement) -> str:
    return megabytes(row.peak_bytes)


def _rated(row: Measurement) -> str:
    """Milliseconds, and TFLOP/s."""
    return f"{number(row.median)} ({tflops(row):.0f} TFLOP/s)"


def peer(result: Result, shape: str, kind: str, who: str, write: Callable[[Measurement], str] = _ms) -> str:
    """What is to be written of a pass, its milliseconds unless told, or why it did not run."""
    return _left_out(result, shape, kind, who) or write(the_row(result, f"{shape} {kind}, {who}"))


def _left_out(result: Result, shape: str, kind: str, who: str) -> str | None:
    """Why a pass did not run, if it was left out."""
    for left in result.conditions["left_out"]:
        if (left["shape"], left["kind"], left["who"]) == (shape, kind, who):
            return left["why"]
    return None


def _share(row: Measurement, least: float) -> str:
    percent = 100 * share(row)
    shown = beside(percent, least)
    return f"**{shown}**" if percent < least else shown


TABLES: Mapping[str, Callable[[Folder], MarkdownTable]] = {
    "jvp-attention": attention,
    "jvp-attention-sizes": attention_sizes,
    "jvp-attention-memory": attention_memory,
    "jvp-attention-slower": attention_slower,
    "jvp-norms": norms,
    "low-scores": low_scores,
}
