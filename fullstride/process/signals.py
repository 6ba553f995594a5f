"""Stop signals, which a run obeys after it has saved."""

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


class StopNow(BaseException):
    """Stop signal during work that may be dropped; no library's `except Exception` catches it."""


def _say(line: str) -> None:
    # Not through sys.stderr, which the signal may have interrupted in the middle of a write.
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode())


def _is_dropped(frame: FrameType | None) -> bool:
    """Return whether an exception raised in this frame would be lost in a callback of the garbage collector."""
    callbacks = {getattr(callback, "__code__", None) for callback in gc.callbacks}
    while frame is not None:
        if frame.f_code in callbacks:
            return True
        frame = frame.f_back
    return False


class _Block:
    """Block of work that a signal ends by an exception; a SIGTERM follows if Python has dropped that.

    Attributes:
        left: whether the block has ended.
        sent: whether such a SIGTERM is on its way.
        failing: whether an error that left a `StopSignal` is on its way out of the block.

    """

    def __init__(self) -> None:
        self.left = self.sent = self.failing = False
        self._sending = threading.Lock()

    def ends_by_raising(self, frame: FrameType | None) -> bool:
        """Return whether raising in a signal's handler there can end the block; if it fails, a SIGTERM follows."""
        dropped = _is_dropped(frame)
        timer = threading.Timer(SOON if dropped else LOST, self._send)
        timer.daemon = True
        timer.start()
        return not dropped

    def _send(self) -> None:
        with self._sending:
            if not self.left:
                self.sent = True
                os.kill(os.getpid(), signal.SIGTERM)

    def leave(self) -> None:
        """Send nothing from here on: it would end later work."""
        with self._sending:
            self.left = True


# Those of `leaving_on_sigterm` that are under way.
_blocks: list[_Block] = []


def _leave(_: int, frame: FrameType | None) -> None:
    block = _blocks[-1]
    if block.failing:
        # torchrun tells the others when one has died, of which they fail as well. The error is what has to be seen.
        block.failing = False
        _say("SIGTERM: already ending after an error")
    elif block.ends_by_raising(frame):
        _say("stopped with nothing to save")
        raise SystemExit(0)


@contextmanager
def leaving_on_sigterm() -> Iterator[None]:
    """Let SIGTERM end the process with 0 within the block, unless a `StopSignal` has something to save."""
    _blocks.append(block := _Block())
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        yield
    finally:
        block.leave()
        signal.signal(signal.SIGTERM, before)
        _blocks.remove(block)


class StopSignal:
    """Records SIGINT and SIGTERM instead of ending the process, so that the run can save first.

    A second SIGINT, at least one second after the first signal, ends the process: the step or the save may hang.

    Attributes:
        signal: number of the last signal, or None.

    """

    def __init__(
        self,
        told: str = "stopping as soon as possible; Ctrl-C again ends without saving",
        ended: str = "ended without saving",
    ) -> None:
        """Make a record without a signal.

        Args:
            told: message on stderr when the first signal comes.
            ended: message of the KeyboardInterrupt that a second one raises.

        """
        self.signal: int | None = None
        self._told, self._ended = told, ended
        self._came = 0.0
        self._block = _Block()  # of work that the first signal ends at once
        self._block.left = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        block = self._block
        if block.sent:
            block.sent = False
        elif self.signal is None:
            self._came = time.monotonic()
            _say(f"{signal.Signals(number).name}: {self._told}")
            self.signal = number
        elif number == signal.SIGINT and time.monotonic() - self._came >= ANOTHER:
            raise KeyboardInterrupt(self._ended)
        else:
            self.signal = number
            return
        if not block.left and block.ends_by_raising(frame):
            raise StopNow

    def arm(self) -> None:
        """Install the handlers again, whatever others were installed meanwhile.

        LLVM, which Triton compiles with, puts its own handler of SIGTERM there, which serves one signal: when two come
        microseconds apart, as timeout(1) sends them, the second ends the process silently. Python meanwhile
        goes on to report the handler that was replaced.
        """
        for number in SIGNALS:
            signal.signal(number, self._handle)

    def unless_stopped(self, act: Callable[[], T]) -> T | None:
        """Return `act()`, or None if a signal came before or during it; a signal ends it at once.

        Use it for work that leaves the run unchanged.
        """
        self._block = block = _Block()
        try:
            try:
                return act() if self.signal is None else None
            finally:
                block.leave()
        except StopNow:
            block.leave()
            return None

    def __enter__(self) -> "StopSignal":
        """Record until the context ends."""
        self._old = {number: signal.getsignal(number) for number in SIGNALS}
        self.arm()
        if _blocks:
            _blocks[-1].failing = False
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Put the handlers back; the next SIGTERM leaves an error that passes here alone."""
        if _blocks and kind is not None and issubclass(kind, Exception) and not issubclass(kind, Preempted):
            _blocks[-1].failing = True
        for number, handler in self._old.items():
            signal.signal(number, handler)


def run_or_stop(act: Callable[[], T], what: str) -> T:
    """Return `act()`; a stop signal ends it at once, since it changes nothing that would have to be saved.

    Args:
        act: the work; it may not return None.
        what: its name in messages.

    Raises:
        Preempted, KeyboardInterrupt: if SIGTERM or SIGINT came.

    """
    with StopSignal("stopping", f"ended at once in {what}") as stop:
        found = stop.unless_stopped(act)
    if found is None:
        message = f"stopped in {what}; to begin it again, run the same command"
        raise KeyboardInterrupt(message) if stop.signal == signal.SIGINT else Preempted(message)
    return found
