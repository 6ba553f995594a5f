"""Time a call: warm-up apart, device events or a synchronised clock, the median with its spread, raw samples kept."""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

Call = Callable[[], Any]


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
        """Nothing to reset: the host's peak cannot be."""

    def peak_bytes(self) -> None:
        """Not known."""


class CudaClock:
    """CUDA events around the call: the time from the device's start on it to its end, launch gaps included."""

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
        """Most bytes of tensors alive at once since the last reset."""
        import torch

        return torch.cuda.max_memory_allocated()


def clock_for(device: str) -> Clock:
    """The clock of a device type, `cuda`, `mps` or `cpu`."""
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
        first_ms: the very first call, which holds compilation and allocation.
        samples_ms: every timed call, in order.
        peak_bytes: most device memory alive during the timed calls; None where it is not known.

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

    def to_dict(self) -> dict[str, Any]:
        """JSON-serialisable, summary and raw samples."""
        summary = {"median_ms": self.median_ms, "p10_ms": self.quantile(0.1), "p90_ms": self.quantile(0.9)}
        return asdict(self) | summary | {"samples_ms": list(self.samples_ms)}


@dataclass(frozen=True)
class Plan:
    """How often to call: at least `repeats` times, and on until `seconds` have been timed or `most` calls made."""

    warmup: int = 3
    repeats: int = 10
    seconds: float = 1.0
    most: int = 200

    def done(self, samples: list[float]) -> bool:
        """Whether these samples, in milliseconds, are enough."""
        return len(samples) >= self.repeats and (sum(samples) >= self.seconds * 1e3 or len(samples) >= self.most)


def measure(call: Call, clock: Clock, plan: Plan = Plan()) -> Timing:
    """Time `call` after one first call and `plan.warmup` more."""
    first = clock.time(call)
    for _ in range(plan.warmup):
        clock.time(call)
    clock.reset_peak()
    samples: list[float] = []
    while not plan.done(samples):
        samples.append(clock.time(call))
    return Timing(first, tuple(samples), clock.peak_bytes())


@dataclass(frozen=True)
class Pair:
    """Two functions timed in turns, in one run.

    Attributes:
        a: times of the first.
        b: times of the second.
        ratios: b over a, pair by pair: what drifts with the machine cancels.

    """

    a: Timing
    b: Timing
    ratios: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """Median of the ratios."""
        return statistics.median(self.ratios)


def measure_pair(a: Call, b: Call, clock: Clock, plan: Plan = Plan()) -> Pair:
    """Time two functions in the order a b b a, so that neither always goes first."""
    firsts = clock.time(a), clock.time(b)
    for _ in range(plan.warmup):
        for call in (a, b):
            clock.time(call)
    clock.reset_peak()
    times: tuple[list[float], list[float]] = [], []
    while not plan.done(times[0]):
        order = (0, 1) if len(times[0]) % 2 == 0 else (1, 0)
        for which in order:
            times[which].append(clock.time((a, b)[which]))
    peak = clock.peak_bytes()
    timing_a, timing_b = (Timing(first, tuple(t), peak) for first, t in zip(firsts, times, strict=True))
    return Pair(timing_a, timing_b, tuple(y / x for x, y in zip(*times, strict=True)))
