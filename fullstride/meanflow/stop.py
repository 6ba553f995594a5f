"""Stop signals that a run saves before it obeys."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopNow(Exception):  # noqa: N818, it is no error
    """A signal came while nothing of the run changed."""


class Stop:
    """SIGINT and SIGTERM, collected instead of died of, so that the run can save where it is.

    Attributes:
        signal: the last one that came, or None.

    """

    def __init__(self) -> None:
        """Nothing came yet."""
        self.signal: int | None = None
        self._at_once = False

    def _handle(self, number: int, _: object) -> None:
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

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """A block that changes nothing of the run: a signal ends it at once, and only it."""
        try:
            self._at_once = True
            yield
        except StopNow:
            pass
        finally:
            self._at_once = False

    def __enter__(self) -> "Stop":
        """Collect until the context ends."""
        self._old = {number: signal.getsignal(number) for number in SIGNALS}
        self.arm()
        return self

    def __exit__(self, *_: object) -> None:
        """As before."""
        for number, handler in self._old.items():
            signal.signal(number, handler)
