"""Stop signals that a run saves before it obeys."""

import contextlib
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

from fullstride.errors import Preempted

T = TypeVar("T")

SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Wrappers pass on a Ctrl-C that the terminal has sent already: only a later one is another.
ANOTHER = 1.0
# What is raised in a callback of the garbage collector or in a destructor Python drops. A signal that finds a callback,
# as JAX has one, is sent again after SOON seconds; one that ends nothing within LOST seconds has found a destructor.
SOON, LOST = 0.05, 2.0


class _Block:
    """One of `leaving_on_sigterm`; `failing` while an error that left a `Stop` is on its way out."""

    failing = False


# Those under way.
_blocks: list[_Block] = []
_sending = threading.Lock()


class StopNow(BaseException):
    """A signal came while nothing of the run changed; no library's `except Exception` may hold it up."""


def _say(line: str) -> None:
    # Not through sys.stderr, which the signal may have interrupted in the middle of a write.
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode())


def _later(seconds: float, act: Callable[[], None]) -> None:
    timer = threading.Timer(seconds, act)
    timer.daemon = True
    timer.start()


def _is_dropped(frame: FrameType | None) -> bool:
    """Whether what is raised there is in a callback of the garbage collector."""
    callbacks = {getattr(callback, "__code__", None) for callback in gc.callbacks}
    while frame is not None:
        if frame.f_code in callbacks:
            return True
        frame = frame.f_back
    return False


def _leave(_: int, frame: FrameType | None) -> None:
    dropped, block = _is_dropped(frame), _blocks[-1] if _blocks else None
    if block is not None and block.failing:
        # torchrun tells the others when one has died, of which they fail as well. The error is what has to be seen.
        block.failing = False
        _say("SIGTERM: an error has ended this already")
        return
    _later(SOON if dropped else LOST, lambda: _leave_all_the_same(block))
    if not dropped:
        _say("stopped with nothing to save")
        raise SystemExit(0)


def _leave_all_the_same(block: object) -> None:
    with _sending:
        if block in _blocks:  # a `Stop` that has begun in it meanwhile is told, too
            os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def leaving_on_sigterm() -> Iterator[None]:
    """A block in which SIGTERM ends the process with 0, wherever no `Stop` has something to save."""
    _blocks.append(block := _Block())
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        yield
    finally:
        with _sending:  # nothing is under way to what comes after
            _blocks.remove(block)
        signal.signal(signal.SIGTERM, before)


class Stop:
    """SIGINT and SIGTERM, collected instead of died of, so that the run can save where it is.

    A second SIGINT, a second or more after the first, is died of: the step or the save may hang.

    Attributes:
        signal: the last one that came, or None.

    """

    def __init__(
        self,
        told: str = "stopping as soon as possible; Ctrl-C again ends without saving",
        ended: str = "ended without saving",
    ) -> None:
        """Nothing came yet.

        Args:
            told: on stderr, when the first signal comes.
            ended: of the interrupt that another one is.

        """
        self.signal: int | None = None
        self._told, self._ended = told, ended
        self._at_once = self._inside = self._own = False
        self._came = 0.0
        self._sending = threading.Lock()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._own:
            self._own = False
            self._stop_now(self._inside, frame)
            return
        if self.signal is None:
            self._came = time.monotonic()
            _say(f"{signal.Signals(number).name}: {self._told}")
        elif number == signal.SIGINT and time.monotonic() - self._came >= ANOTHER:
            raise KeyboardInterrupt(self._ended)
        self.signal = number
        self._stop_now(self._at_once, frame)

    def _stop_now(self, wanted: bool, frame: FrameType | None) -> None:
        if not wanted:
            return
        self._at_once = False  # once is enough, if it arrives
        dropped = _is_dropped(frame)
        _later(SOON if dropped else LOST, self._stop_all_the_same)
        if not dropped:
            raise StopNow

    def _stop_all_the_same(self) -> None:
        with self._sending:
            if self._inside:
                self._own = True
                os.kill(os.getpid(), signal.SIGTERM)

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
                self._at_once = self._inside = self.signal is None
                return act() if self._at_once else None
            finally:
                self._at_once = False
                with self._sending:  # nothing is under way to what comes after
                    self._inside = False
        except StopNow:
            self._inside = False
            return None

    def __enter__(self) -> "Stop":
        """Collect until the context ends."""
        self._old = {number: signal.getsignal(number) for number in SIGNALS}
        self.arm()
        if _blocks:
            _blocks[-1].failing = False
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Go on as before; the next SIGTERM leaves an error that passes here alone."""
        if _blocks and kind is not None and issubclass(kind, Exception) and not issubclass(kind, Preempted):
            _blocks[-1].failing = True
        for number, handler in self._old.items():
            signal.signal(number, handler)


def at_once(act: Callable[[], T], what: str) -> T:
    """What `act` returns; a stop signal ends it at once, since it changes nothing that would have to be saved.

    Args:
        act: what is done; it may not return None.
        what: names it.

    Raises:
        Preempted, KeyboardInterrupt: if SIGTERM or SIGINT came.

    """
    with Stop("stopping", f"ended at once in {what}") as stop:
        found = stop.unless_stopped(act)
    if found is None:
        message = f"stopped in {what}; to begin it again, run the same command"
        raise KeyboardInterrupt(message) if stop.signal == signal.SIGINT else Preempted(message)
    return found
