"""A stop signal to a bench: nothing more is begun, and what has been measured is written."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from fullstride.errors import Preempted
from fullstride.stop import ANOTHER, SIGNALS, tell

_under_way: list["Ending"] = []


class Ending:
    """The signals of a block; the first is taken down, and one that comes a second or more after it is obeyed.

    Attributes:
        signal: the first one that came, or None.

    """

    def __init__(self) -> None:
        """Nothing came yet."""
        self.signal: int | None = None
        self._came = 0.0
        self._old = {number: signal.getsignal(number) for number in SIGNALS}

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self.signal is None:
            self.signal, self._came = number, time.monotonic()
            name = signal.Signals(number).name
            tell(f"{name}: nothing more is begun, and what is measured is written; again ends at once without it")
        elif time.monotonic() - self._came >= ANOTHER:  # wrappers pass on what the terminal has sent already
            self.give_back()
            signal.raise_signal(number)

    def arm(self) -> None:
        """Take the signals from here on; compilers put handlers of their own there, see `Stop.arm`."""
        for number in SIGNALS:
            signal.signal(number, self._handle)

    def give_back(self) -> None:
        """As before."""
        for number, handler in self._old.items():
            signal.signal(number, handler)


@contextmanager
def ending_early() -> Iterator[None]:
    """A block of the main thread in which SIGTERM or Ctrl-C spends every `Budget`: what was measured is written.

    Raises:
        Preempted, KeyboardInterrupt: at its end, if SIGTERM or SIGINT came.

    """
    _under_way.append(ending := Ending())
    ending.arm()
    try:
        yield
    finally:
        _under_way.remove(ending)
        ending.give_back()
    if ending.signal is not None:
        message = "stopped; what was measured is written, and what is left out named"
        raise KeyboardInterrupt(message) if ending.signal == signal.SIGINT else Preempted(message)


def asked_to_end() -> bool:
    """Whether a signal came in a block of `ending_early` that is under way."""
    if threading.current_thread() is threading.main_thread():
        for ending in _under_way:
            if ending.signal is None:
                ending.arm()
    return any(ending.signal is not None for ending in _under_way)
