"""What a watchdog knows and when it has seen enough: limits and clocks, without a thread."""

import threading
from dataclasses import dataclass

# Share of the steps to the first checkpoint after which their pace is known.
MEASURED = 0.25
# Once a checkpoint is overdue the trainer saves at its next step. An attempt that does not is ended after this many
# times as long: on a machine that has merely become slower, nothing is lost and nothing ends.
GRACE = 2.0


@dataclass(frozen=True)
class Limits:
    """How long what may last, in seconds; 0 is for ever.

    Attributes:
        first_step: until a first step is made: workers start, graphs compile, checks run.
        step: from one step to the next, saves included.
        evaluation: of one.
        gpu_idle: without anything running on the GPU between steps.
        checkpoint_factor: times the expected time between checkpoints, after which the next one is overdue; evaluations
            do not count.
        checkpoint_least: least time after which a checkpoint is overdue.
        shown: after which the stack of every thread is printed.

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
    """Why an attempt has to end."""

    reason: str
    message: str


def span(seconds: float) -> str:
    """A time for people, as in `90 s` or `12 min`."""
    return f"{seconds / 60:g} min" if seconds >= 120 else f"{seconds:g} s"


class Clocks:
    """Times since each thing last happened; told how much time has passed, never asking a clock, by any thread.

    Attributes:
        silent: seconds since something moved.
        overdue: the checkpoint has taken longer than the limits allow.

    """

    def __init__(self, limits: Limits, step: int):
        """Begin before the first step of a process that goes on after `step` steps."""
        self.limits, self.silent, self._idle = limits, 0.0, 0.0
        self.overdue = False
        self._lock = threading.Lock()
        self._what, self._limit, self._training = "the first step", limits.first_step, False
        self._step = step
        self._ahead, self._unsaved, self._made, self._pace, self._first = 0, 0.0, 0, 0.0, True

    @property
    def awaited(self) -> str:
        """What is being waited for."""
        return f"step {self._step + 1}" if self._training else self._what

    def train(self) -> None:
        """Steps are made from here on."""
        with self._lock:
            self._training = True
            self._limit = self.limits.step
            self.silent = 0.0
            self._idle = 0.0

    def wait_for(self, what: str, limit: float) -> None:
        """Something else than steps is done from here on, for `limit` seconds at most; 0 is for ever."""
        with self._lock:
            self._training = False
            self._what = what
            self._limit = limit
            self.silent = 0.0

    def expect_checkpoint(self, ahead: int) -> None:
        """A checkpoint was made, or refused and told; the next one is `ahead` steps away."""
        with self._lock:
            if self._made and self._unsaved:
                self._pace, self._first = max(0.0 if self._first else self._pace, self._unsaved / self._made), False
            self._ahead = ahead
            self._unsaved = 0.0
            self._made = 0
            self.overdue = False

    def pass_time(self, seconds: float, step: int, busy: bool | None) -> Verdict | None:
        """Let time pass.

        Args:
            seconds: since the last call.
            step: optimizer steps that were made.
            busy: whether anything runs on the GPU; None if nobody knows.

        Returns:
            Why the attempt has to end, if it has to.

        """
        with self._lock:
            moved = step - self._step
            self.silent = 0.0 if moved else self.silent + seconds
            self._step = step
            if self._training:
                self._idle = self._idle + seconds if busy is False else 0.0
                self._count(seconds, max(0, moved))
            return self._no_step() or self._gpu_idle() or self._no_checkpoint()

    def _count(self, seconds: float, moved: int) -> None:
        self._unsaved, self._made = self._unsaved + seconds, self._made + moved
        if self._first and not self._pace and self._made >= max(1, MEASURED * self._ahead):
            self._pace = self._unsaved / self._made

    def _no_step(self) -> Verdict | None:
        if not self._limit or self.silent < self._limit:
            return None
        return Verdict("no_step", f"no progress for {span(self._limit)}, waiting for {self.awaited}")

    def _gpu_idle(self) -> Verdict | None:
        if not self.limits.gpu_idle or self._idle < self.limits.gpu_idle:
            return None
        return Verdict("gpu_idle", f"nothing ran on the GPU for {span(self.limits.gpu_idle)}, at {self.awaited}")

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
