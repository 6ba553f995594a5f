"""The time that training takes, apart from what comes before it and from the scoring in between."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Steps of a process that belong to its start: in them kernels are compiled, compared with eager ones, and recorded.
START = 5


class Clock:
    """Seconds of training over several processes.

    The first steps of each process are start-up. That of the first process is kept; what later ones need to go on is
    an accident of how a run was cut into pieces, and counts nowhere.

    Attributes:
        startup: seconds until the first process had made its first steps; None before.

    """

    def __init__(self, wait: Callable[[], None], now: Callable[[], float] = time.perf_counter):
        """Begin a process.

        Args:
            wait: returns when the device has done everything.
            now: reads a clock.

        """
        self.startup: float | None = None
        self._wait, self._now, self._trained = wait, now, 0.0
        self._born, self._steps = now(), 0
        self._since: float | None = None

    def go_on(self, trained: float, startup: float | None) -> None:
        """After so many seconds of training in earlier processes, and the start-up of the first."""
        self._trained, self.startup = trained, startup

    def step(self) -> None:
        """A step was made, or is on its way on the device."""
        self._steps += 1
        if self._steps != START:
            return
        self._wait()
        self._since = self._now()
        if self.startup is None:
            self.startup = self._since - self._born

    @property
    def running(self) -> bool:
        """Whether the process's first steps are over."""
        return self._since is not None

    @property
    def seconds(self) -> float:
        """Of training, as the host sees it, which may be ahead of the device."""
        return self._trained + (0.0 if self._since is None else self._now() - self._since)

    @contextmanager
    def paused(self) -> Iterator[float]:
        """A block whose time does not count; gives the seconds of training when the device had done its steps."""
        self._wait()
        self._trained, self._since = self.seconds, None
        try:
            yield self._trained
        finally:
            self._wait()
            self._since = self._now()
