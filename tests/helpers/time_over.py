"""The end of a `--limit` at a moment that a test chooses."""

import os
import signal
import time
from collections.abc import Callable

from benchmarks.harness.time_limit import Limit


def over_within(monkeypatch) -> Callable[..., None]:
    """Work during which all time limits expire; it takes long if nothing ends it."""
    over = []

    def work(*given: object) -> None:
        over.append(given)
        os.kill(os.getpid(), signal.SIGTERM)  # as the limit does at its end
        time.sleep(90)

    monkeypatch.setattr(Limit, "left", property(lambda limit: -1.0 if over else 1000.0))
    return work
