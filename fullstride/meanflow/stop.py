"""Stop signals that a run saves before it obeys."""

import signal

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopNow(Exception):  # noqa: N818, it is no error
    """A signal came while nothing of the run changed."""


class Stop:
    """SIGINT and SIGTERM, collected instead of died of, so that the run can save where it is.

    Attributes:
        signal: the last one that came, or None.
        at_once: raise `StopNow` where a signal comes: while nothing of the run changes, it need not wait for a step.

    """

    def __init__(self) -> None:
        """Nothing came yet."""
        self.signal: int | None = None
        self.at_once = False

    def _handle(self, number: int, _: object) -> None:
        self.signal = number
        if self.at_once:
            raise StopNow

    def arm(self) -> None:
        """Collect from here on, whatever was put in place meanwhile.

        LLVM, which Triton compiles with, does that: its own handler of SIGTERM ends the process without a word, and
        Python goes on to report the one that it replaced.
        """
        for number in SIGNALS:
            signal.signal(number, self._handle)

    def __enter__(self) -> "Stop":
        """Collect until the context ends."""
        self._old = {number: signal.getsignal(number) for number in SIGNALS}
        self.arm()
        return self

    def __exit__(self, *_: object) -> None:
        """As before."""
        for number, handler in self._old.items():
            signal.signal(number, handler)
