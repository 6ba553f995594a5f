"""A stop signal to a bench: nothing more is begun, and what has been measured is written."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from fullstride.errors import Preempted
from fullstride.process.signals import Stop

TOLD = "nothing more is begun, and what is measured is written; Ctrl-C again ends at once without it"
ENDED = "ended without writing what was measured"
WRITTEN = "stopped; what was measured is written, and what is left out named"

_under_way: list[Stop] = []


@contextmanager
def ending_early() -> Iterator[None]:
    """A block of the main thread in which SIGTERM or Ctrl-C spends every `Budget`: what was measured is written.

    Raises:
        Preempted, KeyboardInterrupt: at its end, if SIGTERM or SIGINT came.

    """
    with Stop(TOLD, ENDED) as stop:
        _under_way.append(stop)
        try:
            yield
        finally:
            _under_way.remove(stop)
    if stop.signal is not None:
        raise KeyboardInterrupt(WRITTEN) if stop.signal == signal.SIGINT else Preempted(WRITTEN)


def asked_to_end() -> bool:
    """Whether a signal came in a block of `ending_early` that is under way."""
    if threading.current_thread() is threading.main_thread():
        for stop in _under_way:
            stop.arm()  # anew: what compiles has handlers of its own
    return any(stop.signal is not None for stop in _under_way)
