"""A step that never ends is reported while it hangs."""

import faulthandler
import sys
import threading
from types import TracebackType


class Watchdog:
    """Prints where every thread is, once, if nothing was heard for `seconds`; 0 watches nothing."""

    def __init__(self, seconds: float):
        """Make it; the watch begins with the context."""
        self.seconds = seconds
        self._heard = threading.Event()
        self._ended = False
        self._what = "the first step"
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def heard(self, what: str) -> None:
        """Something moved; `what` is being waited for next."""
        self._what = what
        self._heard.set()

    def _watch(self) -> None:
        silent = False
        while not self._ended:
            heard = self._heard.wait(None if silent else self.seconds)
            self._heard.clear()
            if silent := not heard:
                stream = sys.__stderr__ or sys.stderr
                stream.write(f"no progress for {self.seconds:g} s, waiting for {self._what}; every thread is here:\n")
                stream.flush()
                faulthandler.dump_traceback(stream)

    def __enter__(self) -> "Watchdog":
        """Begin to watch."""
        if self.seconds > 0:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        """End the watch."""
        self._ended = True
        self._heard.set()
        if self.seconds > 0:
            self._thread.join()
