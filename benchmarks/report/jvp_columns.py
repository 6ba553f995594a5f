"""Columns of the tables of attention and norms with their derivatives: a name, a pass, who runs it, what is written."""

from benchmarks.report.reading import Measurement
from benchmarks.report.tables import megabytes, number

# What ran beside ours in a result, by the name that its rows have.
FUSED_DUAL = "jvp_flash_attention"


def _ms(row: Measurement) -> str:
    return number(row.median)


def tflops(row: Measurement) -> float:
    """Operations a second, in 10^12."""
    return row.extra["gflop"] / row.median


def share(row: Measurement) -> float:
    """Of the copy rate: the time of a copy of as many bytes over the row's."""
    return 1 / row.over_floor


def _rate(row: Measurement) -> str:
    return number(tflops(row), 3)


def _gflop(row: Measurement) -> str:
    return number(row.extra["gflop"])


def _peak(row: Measurement) -> str:
    """Of a backward pass that of forward and backward together."""
    return megabytes(row.peak_bytes)


def _percent(row: Measurement) -> str:
    return f"{100 * share(row):.0f} %"


def _gigabytes(row: Measurement) -> str:
    """Moved a second, in 10^9."""
    return number(row.extra["bytes"] / row.median / 1e6, 3)


ATTENTION_COLUMNS = (
    ("forward ms", "forward", "ours", _ms),
    ("TFLOP/s", "forward", "ours", _rate),
    ("GFLOP", "forward", "ours", _gflop),
    ("peak MB", "forward", "ours", _peak),
    ("math SDPA's JVP ms", "forward", "vanilla", _ms),
    ("its peak MB", "forward", "vanilla", _peak),
    (f"{FUSED_DUAL} ms", "forward", FUSED_DUAL, _ms),
    ("primal alone, flash TFLOP/s", "primal", "flash", _rate),
    ("primal alone, cuDNN TFLOP/s", "primal", "cudnn", _rate),
    ("backward, tangent detached ms", "detached", "ours", _ms),
    ("GFLOP ", "detached", "ours", _gflop),
    ("peak MB ", "detached", "ours", _peak),
    ("flash ms", "detached", "flash", _ms),
    ("cuDNN ms", "detached", "cudnn", _ms),
    (f"{FUSED_DUAL} ms ", "detached", FUSED_DUAL, _ms),
    ("backward through the tangent ms", "through", "ours", _ms),
    ("GFLOP  ", "through", "ours", _gflop),
    ("peak MB  ", "through", "ours", _peak),
    ("math SDPA ms", "through", "vanilla", _ms),
    ("its peak MB ", "through", "vanilla", _peak),
)
NORM_COLUMNS = (
    ("forward ms", "forward", "ours", _ms),
    ("of copy", "forward", "ours", _percent),
    ("GB/s", "forward", "ours", _gigabytes),
    ("eager ms", "forward", "eager", _ms),
    ("backward, tangent detached ms", "detached", "ours", _ms),
    ("of copy ", "detached", "ours", _percent),
    ("GB/s ", "detached", "ours", _gigabytes),
    ("eager ms ", "detached", "eager", _ms),
    ("backward through the tangent ms", "through", "ours", _ms),
    ("of copy  ", "through", "ours", _percent),
    ("GB/s  ", "through", "ours", _gigabytes),
    ("eager ms  ", "through", "eager", _ms),
)
