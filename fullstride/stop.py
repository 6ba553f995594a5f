"""Stop signals that a run saves before it obeys."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn, TypeVar

T = TypeVar("T")

SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Wrappers pass on a Ctrl-C that the terminal has sent already: only a later one is another.
ANOTHER = 1.0


class StopNow(BaseException):
    """A signal came while nothing of the run changed; no library's `except Exception` may hold it up."""


def _say(line: str) -> None:
    # Not through sys.stderr, which the signal may have interrupted in the middle of a write.
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode())


def _leave(*_: object) -> NoReturn:
    _say("stopped with nothing to save")
    raise SystemExit(0)


@contextmanager
def leaving_on_sigterm() -> Iterator[None]:
    """A block in which SIGTERM ends the process with 0, wherever no `Stop` has something to save."""
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class Stop:
    """SIGINT and SIGTERM, collected instead of died of, so that the run can save where it is.

    A second SIGINT, a second or more after the first, is died of: the step or the save may hang.

    Attributes:
        signal: the last one that came, or None.

    """

    def __init__(self) -> None:
        """Nothing came yet."""
        self.signal: int | None = None
        self._at_once = False
        self._came = 0.0

    def _handle(self, number: int, _: object) -> None:
        if self.signal is None:
            self._came = time.monotonic()
            _say(f"{signal.Signals(number).name}: stopping as soon as possible; Ctrl-C again ends without saving")
        elif number == signal.SIGINT and time.monotonic() - self._came >= ANOTHER:
            raise KeyboardInterrupt("ended without saving; resume=true goes on from the last checkpoint")
        self.signal = number
        if self._at_once:
            self._at_once = False  # once is enough
            raise StopNow

    def arm(self) -> None:
        """Collect from here on, whatever was put in place meanwhile.

        LLVM, which Triton compiles with, puts its own handler of SIGTERM there, which serves one signal: when two come
        microseconds apart, as timeout(1) sends them, the second ends the process without a word. Python meanwhile
        goes on to report the handler that was replaced.
        """
        for number in SIGNALS:
            signal.signal(number, self._handle)

    def unless_stopped(self, act: Callable[[], T]) -> T | None:
        """What `act` returns; None if a signal came before or meanwhile, which ends it at once.

        For what changes nothing of the run that would be missed.
        """
        try:
            try:
                self._at_once = self.signal is None
                return act() if self._at_once else None
            finally:
                self._at_once = False
        except StopNow:
            return None

    def __enter__(self) -> "Stop":
        """Collect until the context ends."""
        self._old = {number: signal.getsignal(number) for number in SIGNALS}
        self.arm()
        return self

    def __exit__(self, *_: object) -> None:
        """As before."""
        for number, handler in self._old.items():
            signal.signal(number, handler)
