"""What is asked of the ways to call a step, and whether a run met it."""

from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.cases.step_jax.host import Times, ratios


@dataclass(frozen=True)
class Target:
    """The processor time of one way over another's."""

    name: str  # the way
    against: str  # what it is compared with
    limit: float  # the ratio's median may be this at most

    def judged(self, times: dict[str, Times]) -> dict[str, Any]:
        """The ratio in a run, with its spread."""
        found = ratios(times[self.name].cpu, times[self.against].cpu)
        spread = {"p10": found.quantile(0.1), "p90": found.quantile(0.9)}
        return asdict(self) | {"ratio": found.median_ms, **spread, "passed": found.median_ms <= self.limit}


TARGETS = (
    Target("TrainStep", "flat list", 1.15),
    Target("TrainStep grouped", "flat list", 0.3),
    Target("make_train_step", "flat list", 1.5),
    Target("cached_filter_jit", "filter_jit", 0.25),
    Target("cached_filter_jit", "filter_jit patched", 0.5),
    Target("cached_filter_jit donated", "filter_jit donated", 0.25),
    Target("cached_filter_jit donated", "filter_jit patched, donated", 0.5),
)


def judged(times: dict[str, Times]) -> list[dict[str, Any]]:
    """Every target whose ways were measured."""
    return [t.judged(times) for t in TARGETS if t.name in times and t.against in times]


def break_even(first_ms: float, step_ms: float, other_first_ms: float, other_step_ms: float) -> float | None:
    """Steps after which the first of two ways, that may take longer to start, is ahead; None for never."""
    saved = other_step_ms - step_ms
    return max(0.0, (first_ms - other_first_ms) / saved) if saved > 0 else None
