"""A clock that the measured functions themselves advance."""

from collections.abc import Callable
from typing import Any


class FakeClock:
    """Milliseconds pass only where a measured function says so; memory is what it says it took."""

    def __init__(self):
        self.now = 0.0
        self.calls: list[str] = []
        self.peak = 0

    def function(self, name: str, costs: list[float], peaks: list[int] | None = None) -> Callable[[], None]:
        """Return a function that takes costs[i] ms at its i-th call, and the last cost at all later ones."""

        def call() -> None:
            i = self.calls.count(name)
            self.calls.append(name)
            self.now += costs[min(i, len(costs) - 1)]
            if peaks:
                self.peak = max(self.peak, peaks[min(i, len(peaks) - 1)])

        return call

    def time(self, call: Callable[[], Any]) -> float:
        start = self.now
        call()
        return self.now - start

    def reset_peak(self) -> None:
        self.peak = 0

    def peak_bytes(self) -> int:
        return self.peak
