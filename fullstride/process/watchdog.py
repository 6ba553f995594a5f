"""A thread that ends its own process when it no longer does what it is there for.

A step costs nothing for it: it reads a counter now and then. It ends the process from beside, so that a main thread
which is stuck in a CUDA call or in a collective does not keep it alive; where such a call even holds Python's lock, a
timer of faulthandler's, which needs no lock, ends it with exit code 1, later.
"""

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType

from fullstride.process.exit_codes import STUCK
from fullstride.process.watchdog_clocks import Clocks, Limits, Verdict, span

OFTEN, RARELY = 0.02, 5.0  # seconds between looks
LOCKED = 2.0  # times the longest limit: how long Python's lock may be held
TELLING = 15.0  # seconds that telling may take, on a disk that hangs

Tell = Callable[[Verdict, int], None]


def end_process(verdict: Verdict, step: int, tell: Tell) -> None:
    """Say why and where, then end this process with exit code `STUCK`, whatever the other threads do."""

    def say() -> None:
        tell(verdict, step)
        line = f"watchdog: {verdict.message}; ending with exit code {STUCK}, resume=true goes on; every thread is here:"
        os.write(2, f"{line}\n".encode())
        faulthandler.dump_traceback(2)

    telling = threading.Thread(target=say, daemon=True)
    telling.start()
    telling.join(TELLING)
    os._exit(STUCK)


class Watchdog(Clocks):
    """Watches from the beginning of its context to the end; without limits there is no thread."""

    def __init__(
        self,
        limits: Limits,
        step: Callable[[], int],
        tell: Tell,
        busy: Callable[[], bool | None] = lambda: None,
    ):
        """Make it.

        Args:
            limits: how long what may last.
            step: optimizer steps that were made; asked now and then, from another thread.
            tell: leaves a record of why the process ends.
            busy: whether anything runs on the GPU; None if nobody knows.

        """
        super().__init__(limits, step())
        self._ask_step = step
        self._tell = tell
        self._busy = busy
        given = limits.first_step, limits.step, limits.evaluation, limits.gpu_idle, limits.shown
        least = limits.checkpoint_least or 1.0 if limits.checkpoint_factor else 0.0
        self._times = [seconds for seconds in (*given, least) if seconds]
        self._every = min(RARELY, max(OFTEN, min(self._times, default=RARELY) / 4))
        self._ended, self._shown = threading.Event(), False
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    @property
    def checkpoint_overdue(self) -> bool:
        """The run should save at its next step, since its checkpoint has taken longer than expected."""
        return self.overdue

    def _watch(self) -> None:
        before = time.monotonic()
        while not self._ended.wait(self._every):
            self._arm()
            now = time.monotonic()
            # A process that was suspended, as by Ctrl-Z, was not idle.
            passed, before = min(now - before, 2 * self._every), now
            self._look(passed)

    def _look(self, passed: float) -> None:
        step = self._ask_step()
        verdict = self.pass_time(passed, step, self._busy())
        if verdict and not self._ended.is_set():
            end_process(verdict, step, self._tell)
        # Printed once where every thread is, if nothing moves.
        late = bool(self.limits.shown) and self.silent >= self.limits.shown
        if late and not self._shown:
            stream = sys.__stderr__ or sys.stderr
            told = f"no progress for {span(self.limits.shown)}, waiting for {self.awaited}; every thread is here:"
            stream.write(f"{told}\n")
            stream.flush()
            faulthandler.dump_traceback(stream)
        self._shown = late

    def _arm(self) -> None:
        """Put off the timer that ends a process in which not even this thread can run."""
        ending = [x for x in (self.limits.first_step, self.limits.step, self.limits.evaluation) if x]
        if ending:
            faulthandler.dump_traceback_later(LOCKED * max(ending) + self._every, exit=True, file=2)

    def __enter__(self) -> "Watchdog":
        """Begin to watch."""
        if self._times:
            self._arm()
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        """End the watch."""
        self._ended.set()
        if self._times:
            self._thread.join()
            faulthandler.cancel_dump_traceback_later()
