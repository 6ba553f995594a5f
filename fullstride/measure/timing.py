"""Time a call: warm-up apart, device events or a synchronised clock, the median with its spread, and raw samples."""

import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol, runtime_checkable

from fullstride.errors import one_of
from fullstride.measure.text import milliseconds
from fullstride.renamed import add_old_names

Call = Callable[[], Any]


@runtime_checkable
class Clock(Protocol):
    """Times one call in milliseconds, and knows the device's peak memory."""

    def time(self, call: Call) -> float: ...

    def reset_peak(self) -> None: ...

    def peak_bytes(self) -> int | None: ...


class HostClock:
    """The host's clock, for a device that works while the host waits (cpu) or that `synchronize` waits for (mps)."""

    def __init__(self, synchronize: Callable[[], None] = lambda: None):
        """Make the clock."""
        self.synchronize = synchronize

    def time(self, call: Call) -> float:
        """Milliseconds until the call's work is done."""
        self.synchronize()
        start = time.perf_counter()
        call()
        self.synchronize()
        return (time.perf_counter() - start) * 1e3

    def reset_peak(self) -> None:
        """Do nothing: the host's peak cannot be reset."""

    def peak_bytes(self) -> None:
        """None: unknown on the host."""


class CudaClock:
    """CUDA events around the call: the time from the device's start on it to its end, launch gaps included.

    Events lie on the current stream: work on another counts only if the call makes this one wait for it.
    """

    def time(self, call: Call) -> float:
        """Milliseconds between the two events."""
        import torch

        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    def reset_peak(self) -> None:
        """Forget the peak so far."""
        import torch

        torch.cuda.reset_peak_memory_stats()

    def peak_bytes(self) -> int:
        """Peak bytes of tensors since the last reset, without those in a captured graph's memory pool."""
        import torch

        return torch.cuda.max_memory_allocated()


def clock_for(device: str) -> Clock:
    """The clock of a device type, `cuda`, `mps` or `cpu`.

    Raises:
        ConfigError: for another name, `cuda:1` included: a clock that does not wait for the device times nothing.

    """
    one_of("device", device, ("cuda", "mps", "cpu"))
    if device == "cuda":
        return CudaClock()
    if device == "mps":
        import torch

        return HostClock(torch.mps.synchronize)
    return HostClock()


@dataclass(frozen=True)
class Timing:
    """Times of one function, in milliseconds.

    Attributes:
        first_ms: time of the first call, including compilation and allocation.
        samples_ms: times of all timed calls, in order.
        peak_bytes: peak device memory during the timed calls; None if unknown.

    """

    first_ms: float
    samples_ms: tuple[float, ...]
    peak_bytes: int | None

    def quantile(self, q: float) -> float:
        """The q-quantile of the samples, linearly interpolated."""
        ordered = sorted(self.samples_ms)
        place = q * (len(ordered) - 1)
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (place - low) * (ordered[high] - ordered[low])

    @property
    def median_ms(self) -> float:
        """Median of the samples."""
        return self.quantile(0.5)

    def __str__(self) -> str:
        """`0.118 ms (p10 0.110, p90 0.130; 20 calls)`."""
        median, low, high = map(milliseconds, (self.median_ms, self.quantile(0.1), self.quantile(0.9)))
        return f"{median} ms (p10 {low}, p90 {high}; {len(self.samples_ms)} calls)"

    def to_dict(self) -> dict[str, Any]:
        """JSON-serialisable, summary and raw samples."""
        summary = {"median_ms": self.median_ms, "p10_ms": self.quantile(0.1), "p90_ms": self.quantile(0.9)}
        return asdict(self) | summary | {"samples_ms": list(self.samples_ms)}


@dataclass(frozen=True)
class TimingPlan:
    """Number of calls: at least `repeats`, then more until `seconds` have been timed or `most` calls made.

    Raises:
        ValueError: if nothing would be timed.

    """

    warmup: int = 3
    repeats: int = 10
    seconds: float = 1.0
    most: int = 200

    def __post_init__(self):
        """Check the counts."""
        if self.repeats < 1 or self.warmup < 0:
            raise ValueError(f"repeats is {self.repeats} and warmup {self.warmup}; expected repeats >= 1, warmup >= 0")

    def done(self, samples: list[float]) -> bool:
        """Return whether these samples, in milliseconds, are enough."""
        return len(samples) >= self.repeats and (sum(samples) >= self.seconds * 1e3 or len(samples) >= self.most)


def measure(call: Call, clock: Clock, plan: TimingPlan = TimingPlan()) -> Timing:
    """Time `call` after one first call and `plan.warmup` more."""
    first = clock.time(call)
    for _ in range(plan.warmup):
        clock.time(call)
    clock.reset_peak()
    samples: list[float] = []
    while not plan.done(samples):
        samples.append(clock.time(call))
    return Timing(first, tuple(samples), clock.peak_bytes())


add_old_names(sys.modules[__name__])
