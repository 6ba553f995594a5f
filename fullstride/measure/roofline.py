"""The roofline bound: the time that arithmetic or bytes alone would take at the rates that this machine reaches."""

import sys
import textwrap
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from fullstride.device.precision import rounds_products
from fullstride.measure.text import milliseconds
from fullstride.measure.timing import Timing, TimingPlan, clock_for, measure
from fullstride.renamed import add_old_names

# The mark of a time below its roofline bound in a table, and what it means.
MARK = "(!)"
IMPOSSIBLE = (
    "Below its roofline bound, which cannot be: the time or the measured rates are noisy. Measure again on an idle "
    "machine with more repeats. If it stays below, the work is counted too high: data that stay in a cache are not "
    "moved."
)


def marked(shown: str, ratio: float) -> str:
    """A table's cell on a time that is `ratio` x its roofline bound, with `MARK` if it is below the bound."""
    return f"{shown} {MARK}" if ratio < 1 else shown


def explained(ratios: Iterable[float]) -> str:
    """The legend of `MARK` for a table with these ratios; nothing if none is below 1."""
    return f"{MARK} {IMPOSSIBLE}" if any(ratio < 1 for ratio in ratios) else ""


@dataclass(frozen=True)
class Ceilings:
    """Rates reached on this machine in this run, on random data.

    Attributes:
        flops: floating-point operations a second of one large square matrix product, 2 a multiply-add.
        bytes: bytes a second, read plus written, of one large copy on the device, or of one large reading.
        gemm: size and number format of the product, such as `8192^3 bfloat16`.
        copy: number of bytes copied or read.
        gemm_ms: times of all matrix products.
        copy_ms: times of all copies or readings.
        moved: `copy` or `read`.

    """

    flops: float
    bytes: float
    gemm: str
    copy: int
    gemm_ms: list[float]
    copy_ms: list[float]
    moved: str = "copy"

    def __str__(self) -> str:
        """`770 TFLOP/s (8192^3 bfloat16), 4.28 TB/s copy`."""
        return f"{_rate(self.flops)}FLOP/s ({self.gemm}), {_rate(self.bytes)}B/s {self.moved}"


def _rate(value: float) -> str:
    """A rate in three significant digits with its prefix, `tera` or `giga`."""
    prefix, unit = ("T", 1e12) if value >= 1e12 else ("G", 1e9)
    return f"{value / unit:.3g} {prefix}"


@dataclass(frozen=True)
class Comparison:
    """A measured time and the roofline bound of its work; print it.

    Attributes:
        timing: measured times.
        bound: roofline bound of the work.

    """

    timing: Timing
    bound: "RooflineBound"

    @property
    def ratio(self) -> float:
        """The median over the bound."""
        return self.timing.median_ms / self.bound.ms

    def __str__(self) -> str:
        """Summary of the time and the bound, with a remedy if the time is below it."""
        bound = f"{milliseconds(self.bound.ms)} ms ({self.bound.bound})"
        said = f"{self.timing},\n{self.ratio:.2f} x its roofline bound of {bound}"
        return f"{said}\n{textwrap.fill(IMPOSSIBLE, 80)}" if self.ratio < 1 else said


@dataclass(frozen=True)
class RooflineBound:
    """The roofline bound of some work: no version runs faster than the larger of the two times.

    Attributes:
        arithmetic_ms: operations over the matrix rate.
        memory_ms: bytes that must move over the rate of the copy or the reading.

    """

    arithmetic_ms: float
    memory_ms: float

    @property
    def ms(self) -> float:
        """The binding one."""
        return max(self.arithmetic_ms, self.memory_ms)

    @property
    def bound(self) -> str:
        """Name of the binding one."""
        return "arithmetic" if self.arithmetic_ms >= self.memory_ms else "memory"

    def compare(self, timing: Timing) -> Comparison:
        """Compare a measured time with the bound; `print` the result."""
        return Comparison(timing, self)

    def __str__(self) -> str:
        """`roofline bound 1.234 ms (arithmetic)`."""
        return f"roofline bound {milliseconds(self.ms)} ms ({self.bound})"

    def to_dict(self) -> dict[str, Any]:
        """JSON-serialisable."""
        return asdict(self) | {"ms": self.ms, "bound": self.bound}


def roofline_bound(flops: int | float, moved: int | float, ceilings: Ceilings) -> RooflineBound:
    """Bound the time of work that takes `flops` operations and must move `moved` bytes.

    Raises:
        ValueError: if both are zero or one is negative: nothing could be compared with such a bound.

    """
    if not (flops >= 0 and moved >= 0 and flops + moved > 0):
        raise ValueError(f"flops is {flops} and moved {moved}; expected both >= 0 and at least one > 0")
    return RooflineBound(flops / ceilings.flops * 1e3, moved / ceilings.bytes * 1e3)


# Sizes that fill the device and exceed its caches, but are small enough for two cores.
GEMM_SIZE = {"cuda": 8192, "mps": 4096, "cpu": 2048}
COPY_BYTES = {"cuda": 4 << 30, "mps": 1 << 30, "cpu": 256 << 20}


def measure_ceilings(device: str, dtype: str = "float32") -> Ceilings:
    """Measure both rates on `cuda`, `mps` or `cpu`; `dtype` names the matrix product's number format.

    An fp32 product runs as the process's own TF32 setting says, like the work that it is compared with.
    """
    import torch

    clock, plan = clock_for(device), TimingPlan(warmup=3, repeats=10, seconds=0.3)
    n, size = GEMM_SIZE[device], COPY_BYTES[device]
    a, b = (torch.randn(n, n, device=device, dtype=getattr(torch, dtype)) for _ in range(2))
    product = torch.empty_like(a)
    gemm = measure(lambda: torch.mm(a, b, out=product), clock, plan)
    source = torch.randint(0, 255, (size,), device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    copy = measure(lambda: target.copy_(source), clock, plan)
    tf32 = device == "cuda" and dtype == "float32" and rounds_products()
    name = f"{n}^3 {'tf32' if tf32 else dtype}"
    rates = 2 * n**3 / gemm.median_ms * 1e3, 2 * size / copy.median_ms * 1e3
    return Ceilings(*rates, name, size, list(gemm.samples_ms), list(copy.samples_ms))


add_old_names(sys.modules[__name__])
