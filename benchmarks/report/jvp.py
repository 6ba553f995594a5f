"""Attention and norms with their forward derivatives."""

from collections.abc import Sequence
from statistics import median

from benchmarks.report.case import TIMING, Case, Finding
from benchmarks.report.drawing import Drawn, Series
from benchmarks.report.figures import dots
from benchmarks.report.jvp_columns import ATTENTION_COLUMNS, FUSED_DUAL, NORM_COLUMNS, share, tflops
from benchmarks.report.reading import Measurement, Result
from benchmarks.report.tables import Judge, Table, number, origin_line, pivot

PACKAGES = ("torch", "triton")
# Below them a launch costs more than the work.
LEAST_BYTES = 16 << 20
LEAST_GFLOP = 1.0
# Other derivatives of attention, by the name that their rows have.
DUALS = {"vanilla": "math SDPA", FUSED_DUAL: FUSED_DUAL}
PEERS = (
    ("with tangent, fullstride", "forward", "ours"),
    *((f"with tangent, {name}", "forward", who) for who, name in DUALS.items()),
    ("primal, flash", "primal", "flash"),
    ("primal, cuDNN", "primal", "cudnn"),
)
PASSES = (
    ("forward", "forward", "ours"),
    ("backward, tangent detached", "detached", "ours"),
    ("backward through the tangent", "through", "ours"),
)


def headline(result: Result) -> Measurement:
    """The first forward pass of ours."""
    return next(iter(_rows(result, "forward", "ours")), result.rows[0])


def attention_finding(results: Sequence[Result]) -> Finding | None:
    """The rate of the first result's headline beside the fastest other derivative that ran."""
    row = headline(results[0])
    peers = [m for who in DUALS for m in _rows(results[0], "forward", who) if m.extra["shape"] == row.extra["shape"]]
    if not peers or not row.extra["gflop"]:
        return None
    fastest = min(peers, key=lambda peer: peer.median)
    beside = f"{number(fastest.median / row.median, 3)} x as fast as {DUALS[fastest.extra['who']]}"
    text = f"attention with its tangent, {row.extra['shape']}: {beside}, {results[0].machine}"
    return Finding(f"{number(tflops(row), 3)} TFLOP/s", text)


def norm_finding(results: Sequence[Result]) -> Finding | None:
    """The median share of the copy rate of the first result's forward passes."""
    shapes = _large(results[0])
    rows = [m for m in _rows(results[0], "forward", "ours") if m.extra["shape"] in shapes]
    if not rows:
        return None
    text = f"of the copy rate: norms with their tangents, forward, median of {len(rows)} shapes, {results[0].machine}"
    return Finding(f"{100 * median(map(share, rows)):.0f} %", text)


def _tables(results: Sequence[Result], judge: Judge, columns, what: str) -> list[Table]:
    made = []
    for result in results:
        header, rows = pivot(result, columns)
        caption = f"{what} Precision {result.conditions.get('precision')}; a cell is empty where it was left out."
        made.append(Table(caption, header, rows, note=origin_line(result, judge, PACKAGES)))
    return made


def attention_tables(results: Sequence[Result], judge: Judge) -> list[Table]:
    """One a result, shape by shape."""
    what = "Attention with its derivative beside peers, medians; a backward pass's peak is that of both together."
    return _tables(results, judge, ATTENTION_COLUMNS, what)


def norm_tables(results: Sequence[Result], judge: Judge) -> list[Table]:
    """One a result, shape by shape."""
    return _tables(results, judge, NORM_COLUMNS, "Norms with their derivatives; of copy: share of the copy rate.")


def _rows(result: Result, kind: str, who: str) -> list[Measurement]:
    return [m for m in result.rows if (m.extra.get("kind"), m.extra.get("who")) == (kind, who)]


def _large(result: Result) -> set[str]:
    """Shapes worth drawing; all of them where none is large."""
    ours = _rows(result, "forward", "ours")
    large = {m.extra["shape"] for m in ours if _is_large(m)}
    return large or {m.extra["shape"] for m in result.rows}


def _is_large(row: Measurement) -> bool:
    gflop = row.extra["gflop"]
    return gflop >= LEAST_GFLOP if gflop else row.extra["bytes"] >= LEAST_BYTES


def _series(result: Result, chosen, value) -> list[Series]:
    shapes = _large(result)
    made = [
        Series(name, {m.extra["shape"]: value(m) for m in _rows(result, kind, who) if m.extra["shape"] in shapes})
        for name, kind, who in chosen
    ]
    return [one for one in made if one.values]


def attention_figures(results: Sequence[Result]) -> list[Drawn]:
    """TFLOP/s by shape beside peers and the matrix rate."""
    made = []
    for place, result in enumerate(results):
        series, rate = _series(result, PEERS, tflops), result.data["ceilings"]["flops"] / 1e12
        if not series:
            continue
        figure = dots(series, "TFLOP/s", marks={f"matrix product: {number(rate, 3)}": rate})
        caption = (
            f"Forward pass of attention, TFLOP/s: {result.machine}, {result.conditions.get('precision')}. Output and "
            "tangent together take three times the products of the primal alone. Shapes of a GFLOP or more, if any."
        )
        made.append(Drawn(f"jvp-attention-{place}", caption, figure, "TFLOP/s of attention by shape beside peers"))
    return made


def norm_figures(results: Sequence[Result]) -> list[Drawn]:
    """Share of the copy rate by shape."""
    made = []
    for place, result in enumerate(results):
        series = _series(result, PASSES, lambda m: 100 * share(m))
        if not series:
            continue
        figure = dots(series, "percent of the copy rate", marks={"a copy of as many bytes": 100.0})
        caption = (
            f"Norms with their derivatives, share of the copy rate: {result.machine}, "
            f"{result.conditions.get('precision')}; shapes that move 16 MiB or more, where there are any. A large copy "
            f"moves {number(result.data['ceilings']['bytes'] / 1e9, 3)} GB/s."
        )
        made.append(Drawn(f"jvp-norms-{place}", caption, figure, "Share of the copy rate of norms by shape"))
    return made


def _paths(folder: str, what: str) -> tuple[str, ...]:
    """Of the ops of a folder, by the bench's file that says what is timed."""
    benches = (f"benchmarks/cases/jvp/{name}.py" for name in (what, "common", "timing"))
    return (f"fullstride/jvp/{folder}", *benches, "fullstride/device/cuda_graph.py", *TIMING)


ATTENTION = Case(
    name="jvp-attention",
    title="Attention with its derivative",
    about=(
        "Exact forward-mode derivatives of attention, output and tangent in one pass, and both backward passes. "
        "Operations are counted in matrix products, so a rate close to a plain product's leaves nothing to gain."
    ),
    paths=_paths("attention", "attention_ways"),
    packages=PACKAGES,
    headline=headline,
    finding=attention_finding,
    tables=attention_tables,
    figures=attention_figures,
)
NORMS = Case(
    name="jvp-norms",
    title="Norms with their derivatives",
    about=(
        "GroupNorm, LayerNorm and RMSNorm with their tangents. They are bound by memory: 100 % is a copy of as many "
        "bytes, and what stays in a cache may exceed it."
    ),
    paths=_paths("norms", "norms"),
    packages=PACKAGES,
    headline=headline,
    finding=norm_finding,
    tables=norm_tables,
    figures=norm_figures,
)
