"""Two functions timed in turns in one run, and how sure their ratio is."""

import itertools
import math
from dataclasses import dataclass
from typing import Any

from fullstride.measure.text import aligned, milliseconds
from fullstride.measure.timing import Call, Clock, Timing, TimingPlan

PLAN = TimingPlan()


def sign_test(ratios: tuple[float, ...]) -> float:
    """Two-sided p-value of the sign test that the median ratio is 1; ratios of exactly 1 do not count."""
    above, below = sum(r > 1 for r in ratios), sum(r < 1 for r in ratios)
    tail = sum(math.comb(above + below, k) for k in range(min(above, below) + 1))
    return min(1.0, 2 * tail / 2 ** (above + below))


def median_interval(samples: tuple[float, ...], confidence: float = 0.95) -> tuple[float, float] | None:
    """Interval of the median that the sign test does not reject, from the order statistics; assumes no distribution.

    Returns:
        None if even the whole range is not that sure: below 6 samples at 95 %.

    """
    n, ordered = len(samples), sorted(samples)
    tails = itertools.accumulate(math.comb(n, k) for k in range(n + 1))
    # With `cut` samples dropped at each end, the median lies outside with probability 2 P(Binomial(n, 1/2) <= cut).
    cut = sum(2 * tail / 2**n <= 1 - confidence for tail in itertools.islice(tails, n // 2)) - 1
    return (ordered[cut], ordered[n - 1 - cut]) if cut >= 0 else None


@dataclass(frozen=True)
class Pair:
    """Two functions timed in turns, in one run.

    Attributes:
        a: times of the first function.
        b: times of the second function.

    """

    a: Timing
    b: Timing

    @property
    def ratios(self) -> tuple[float, ...]:
        """b over a, pair by pair: what drifts with the machine cancels."""
        return tuple(b / a for a, b in zip(self.a.samples_ms, self.b.samples_ms, strict=True))

    @property
    def ratio(self) -> float:
        """Median of the ratios; below 1 the second function is the faster one."""
        return Timing(0.0, self.ratios, None).median_ms

    def __str__(self) -> str:
        """Summary of the pairs: a sentence, and a table of both times and their ratio."""
        lines: list[tuple[str, ...]] = [("", "median", "p10", "p90", "first")]
        for name, t in (("a, ms", self.a), ("b, ms", self.b)):
            lines.append((name, *map(milliseconds, (t.median_ms, t.quantile(0.1), t.quantile(0.9), t.first_ms))))
        spread = Timing(0.0, self.ratios, None)
        ratios = (self.ratio, spread.quantile(0.1), spread.quantile(0.9))
        lines.append(("b / a", *(f"{value:.3f}" for value in ratios), ""))
        return f"{self._verdict()}\n\n{aligned(lines)}"

    def _verdict(self) -> str:
        interval, test = median_interval(self.ratios), f"sign test: p = {sign_test(self.ratios):.2g}"
        if interval is None or interval[0] <= 1 <= interval[1]:
            return f"{len(self.ratios)} pairs show no difference ({test}); more repeats may show one."
        return (
            f"b is {'faster' if self.ratio < 1 else 'slower'}: it takes {self.ratio:.3f} x the time of a,\n"
            f"95 % interval {interval[0]:.3f} to {interval[1]:.3f} ({len(self.ratios)} pairs, {test})."
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-serialisable: the ratio with its spread, its 95 % interval and the sign test; the raw ratios."""
        spread, interval = Timing(0.0, self.ratios, None), median_interval(self.ratios)
        return {
            "ratio": self.ratio,
            "p10": spread.quantile(0.1),
            "p90": spread.quantile(0.9),
            "interval": interval and list(interval),
            "sign_test": sign_test(self.ratios),
            "ratios": list(self.ratios),
        }


class _Turns:
    """One of the two functions: its times, and its own peak memory."""

    def __init__(self, call: Call, clock: Clock):
        self.call, self.clock = call, clock
        self.samples: list[float] = []
        self.peaks: list[int] = []
        self.first = clock.time(call)

    def take(self) -> None:
        self.clock.reset_peak()
        self.samples.append(self.clock.time(self.call))
        if (peak := self.clock.peak_bytes()) is not None:
            self.peaks.append(peak)

    def timing(self) -> Timing:
        return Timing(self.first, tuple(self.samples), max(self.peaks, default=None))


def measure_pair(a: Call, b: Call, clock: Clock, plan: TimingPlan = PLAN) -> Pair:
    """Time two functions in the order a b b a, so that neither always goes first.

    The plan counts pairs and the time of both; it ends on a whole a b b a, so that each goes first equally often.
    """
    first, second = _Turns(a, clock), _Turns(b, clock)
    for _ in range(plan.warmup):
        for call in (a, b):
            clock.time(call)
    while not plan.done([x + y for x, y in zip(first.samples, second.samples, strict=True)]):
        for turn in (first, second, second, first):
            turn.take()
    return Pair(first.timing(), second.timing())
