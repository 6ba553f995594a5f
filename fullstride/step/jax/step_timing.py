"""Split of a step's time: host time of the dispatch, and whether the device waits for it."""

import statistics
import time
from collections import deque
from dataclasses import dataclass, replace

# Steps that a report looks back on at most.
WINDOW = 1000


@dataclass(frozen=True)
class Pace:
    """Medians over the steps since the last report; without new steps, those of the last report.

    Attributes:
        steps: how many there were, the ones that compiled left out.
        host_ms: time until a call came back.
        total_ms: time from one call to the next; 0 if none has followed another yet.
        hidden: share of the calls that came back while an earlier step was still running: the device did not wait.

    """

    steps: int
    host_ms: float
    total_ms: float
    hidden: float

    def __str__(self) -> str:
        """Return a text such as `host 1.8 of 15.9 ms, hidden`."""
        if not self.host_ms:
            return "host: no steps yet"
        if not self.total_ms:
            return f"host {self.host_ms:.1f} ms"
        if self.hidden >= 0.5:
            where = "hidden" if self.hidden == 1 else f"hidden in {self.hidden:.0%} of steps"
        else:
            where = "exposed" if self.hidden == 0 else f"exposed in {1 - self.hidden:.0%} of steps"
        return f"host {self.host_ms:.1f} of {self.total_ms:.1f} ms, {where}"


class Stopwatch:
    """Collector of the times that a `Pace` reports."""

    def __init__(self) -> None:
        self.host: deque[float] = deque(maxlen=WINDOW)
        self.total: deque[float] = deque(maxlen=WINDOW)
        self.hidden: deque[bool] = deque(maxlen=WINDOW)
        self.started: float | None = None
        self._last = Pace(0, 0.0, 0.0, 0.0)

    def lap(self, started: float, busy: bool, counts: bool) -> None:
        """Note a call that began at `started`, a reading of `time.perf_counter`, and is over now.

        One that does not count, because it compiled, is left out, and so is the time from it to the next.
        """
        if not counts:
            self.started = None
            return
        self.host.append(time.perf_counter() - started)
        if self.started is not None:
            self.total.append(started - self.started)
            self.hidden.append(busy)
        self.started = started

    def report(self) -> Pace:
        """Return the pace since the last report, or that report's if no step was timed since."""
        if self.host:
            host = statistics.median(self.host) * 1e3
            total = statistics.median(self.total) * 1e3 if self.total else 0.0
            share = sum(self.hidden) / len(self.hidden) if self.hidden else 0.0
            self._last = Pace(len(self.host), host, total, share)
        else:
            self._last = replace(self._last, steps=0)
        for kept in (self.host, self.total, self.hidden):
            kept.clear()
        return self._last
