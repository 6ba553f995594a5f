"""The end of a `--limit`, at a moment that a test chooses and no clock."""

import os
import signal
import time
from collections.abc import Callable

from benchmarks.harness.time_limit import Limit


def over_within(monkeypatch) -> Callable[..., None]:
    """Work, of any arguments, in which the time of all limits is over; it takes long if nobody ends it."""
    over = []

    def work(*given: object) -> None:
        over.append(given)
        os.kill(os.getpid(), signal.SIGTERM)  # as the limit does at its end
        time.sleep(90)

    monkeypatch.setattr(Limit, "left", property(lambda limit: -1.0 if over else 1000.0))
    return work
