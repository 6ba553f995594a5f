"""Watchdog: a thread that ends its own process when it no longer makes progress.

It costs a step nothing: it reads a counter at intervals. Since it is another thread, a main thread that is stuck in a
CUDA call or in a collective does not keep the process alive. If such a call holds Python's lock, a timer of
faulthandler, which needs no lock, ends the process later with exit code 1.
"""

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from fullstride.process.exit_codes import STUCK

OFTEN, RARELY = 0.02, 5.0  # seconds between looks
LOCKED = 2.0  # times the longest limit: how long Python's lock may be held
TELLING = 15.0  # seconds that telling may take, on a disk that hangs
# Share of the steps to the first checkpoint after which their pace is known.
MEASURED = 0.25
# Once a checkpoint is overdue the trainer saves at its next step. An attempt that does not is ended after this many
# times as long: on a machine that has merely become slower, nothing is lost and nothing ends.
GRACE = 2.0


@dataclass(frozen=True)
class WatchdogLimits:
    """Time limits in seconds; 0 means no limit.

    Attributes:
        first_step: time until the first step is made: workers start, graphs compile, checks run.
        step: time from one step to the next, saves included.
        evaluation: time of one evaluation.
        gpu_idle: time without GPU activity between steps.
        checkpoint_factor: multiple of the expected time between checkpoints after which the next one is overdue;
            evaluations do not count.
        checkpoint_least: least time after which a checkpoint is overdue.
        shown: time without progress after which the stacks of all threads are printed.

    """

    first_step: float = 0.0
    step: float = 0.0
    evaluation: float = 0.0
    gpu_idle: float = 0.0
    checkpoint_factor: float = 0.0
    checkpoint_least: float = 0.0
    shown: float = 0.0


@dataclass(frozen=True)
class Verdict:
    """Reason for which an attempt has to end."""

    reason: str
    message: str


def span(seconds: float) -> str:
    """Format a time, such as `90 s` or `12 min`."""
    return f"{seconds / 60:g} min" if seconds >= 120 else f"{seconds:g} s"


class WatchdogClocks:
    """Clocks since the last event of each kind; any thread advances them with `pass_time`, and none reads a clock.

    Attributes:
        silent: seconds since the last progress.
        overdue: whether the checkpoint has taken longer than the limits allow.

    """

    def __init__(self, limits: WatchdogLimits, step: int):
        """Start before the first step of a process that resumes after `step` steps."""
        self.limits = limits
        self.silent = 0.0
        self._idle = 0.0
        self.overdue = False
        self._lock = threading.Lock()
        self._what = "the first step"
        self._limit = limits.first_step
        self._training = False
        self._step = step
        self._ahead = 0
        self._unsaved = 0.0
        self._made = 0
        self._pace = 0.0
        self._first = True

    @property
    def awaited(self) -> str:
        """Event that is awaited, for messages."""
        return f"step {self._step + 1}" if self._training else self._what

    def train(self) -> None:
        """Note that steps are made from here on."""
        with self._lock:
            self._training = True
            self._limit = self.limits.step
            self.silent = 0.0
            self._idle = 0.0

    def wait_for(self, what: str, limit: float) -> None:
        """Note that other work than steps is done from here on, for `limit` seconds at most; 0 means no limit."""
        with self._lock:
            self._training = False
            self._what = what
            self._limit = limit
            self.silent = 0.0

    def expect_checkpoint(self, ahead: int) -> None:
        """Note that a checkpoint was made, or failed and was reported; the next one is `ahead` steps away."""
        with self._lock:
            if self._made and self._unsaved:
                self._pace, self._first = max(0.0 if self._first else self._pace, self._unsaved / self._made), False
            self._ahead = ahead
            self._unsaved = 0.0
            self._made = 0
            self.overdue = False

    def pass_time(self, seconds: float, step: int, busy: bool | None) -> Verdict | None:
        """Advance the clocks.

        Args:
            seconds: time since the last call.
            step: number of optimizer steps made.
            busy: whether anything runs on the GPU; None if unknown.

        Returns:
            Reason why the attempt has to end, if it has to.

        """
        with self._lock:
            moved = step - self._step
            self.silent = 0.0 if moved else self.silent + seconds
            self._step = step
            if self._training:
                self._idle = self._idle + seconds if busy is False else 0.0
                self._unsaved += seconds
                self._made += max(0, moved)
                if self._first and not self._pace and self._made >= max(1, MEASURED * self._ahead):
                    self._pace = self._unsaved / self._made
            if self._limit and self.silent >= self._limit:
                return Verdict("no_step", f"no progress for {span(self._limit)}, waiting for {self.awaited}")
            if (most := self.limits.gpu_idle) and self._idle >= most:
                return Verdict("gpu_idle", f"nothing ran on the GPU for {span(most)}, at {self.awaited}")
            return self._no_checkpoint()

    def _no_checkpoint(self) -> Verdict | None:
        limits, expected = self.limits, self._ahead * self._pace
        if not limits.checkpoint_factor or not expected:
            return None
        limit = max(limits.checkpoint_least, limits.checkpoint_factor * expected)
        self.overdue = self._unsaved >= limit
        if self._unsaved < GRACE * limit:
            return None
        late = f"{span(round(self._unsaved, 1))} without a checkpoint, expected after {span(round(expected, 1))}"
        return Verdict("no_checkpoint", f"{late}; {self._made} of {self._ahead} steps are made")


Tell = Callable[[Verdict, int], None]


def end_process(verdict: Verdict, step: int, tell: Tell) -> None:
    """Log why and where, then end this process with exit code `STUCK`, whatever the other threads do."""

    def say() -> None:
        tell(verdict, step)
        line = (
            f"watchdog: {verdict.message}; ending with exit code {STUCK}, continue with resume=true; "
            "stacks of all threads:"
        )
        os.write(2, f"{line}\n".encode())
        faulthandler.dump_traceback(2)

    telling = threading.Thread(target=say, daemon=True)
    telling.start()
    telling.join(TELLING)
    os._exit(STUCK)


class Watchdog(WatchdogClocks):
    """Watchdog of a context, from its beginning to its end; without limits there is no thread."""

    def __init__(
        self,
        limits: WatchdogLimits,
        step: Callable[[], int],
        tell: Tell,
        busy: Callable[[], bool | None] = lambda: None,
    ):
        """Take the limits and the functions that observe the process.

        Args:
            limits: time limits.
            step: function that returns the number of optimizer steps made; called from another thread.
            tell: function that records why the process ends.
            busy: function that returns whether anything runs on the GPU; None if unknown.

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
        """True if the run should save at its next step, since its checkpoint takes longer than expected."""
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
            told = f"no progress for {span(self.limits.shown)}, waiting for {self.awaited}; stacks of all threads:"
            stream.write(f"{told}\n")
            stream.flush()
            faulthandler.dump_traceback(stream)
        self._shown = late

    def _arm(self) -> None:
        """Postpone the timer that ends a process in which not even this thread can run."""
        ending = [x for x in (self.limits.first_step, self.limits.step, self.limits.evaluation) if x]
        if ending:
            faulthandler.dump_traceback_later(LOCKED * max(ending) + self._every, exit=True, file=2)

    def __enter__(self) -> "Watchdog":
        if self._times:
            self._arm()
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self._ended.set()
        if self._times:
            self._thread.join()
            faulthandler.cancel_dump_traceback_later()
