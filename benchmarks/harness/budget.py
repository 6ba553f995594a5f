"""Shared parts of benchmarks with many rows: deadline, stop signals, messages, a stream, why a row is missing."""

import gc
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console

from fullstride.errors import Preempted, is_out_of_memory, one_line
from fullstride.process.signals import StopSignal

if TYPE_CHECKING:
    import torch

NO_MEMORY, NO_TIME = "no memory", "no time"
TOLD = "nothing more is begun, and what is measured is written; Ctrl-C again ends at once without it"
ENDED = "ended without writing what was measured"
WRITTEN = "stopped; measured rows are written, and rows left out are named"

_under_way: list[StopSignal] = []


@dataclass(frozen=True)
class Budget:
    """Deadline in seconds of the monotonic clock."""

    until: float

    @classmethod
    def of(cls, seconds: float) -> "Budget":
        """Return a budget that starts now."""
        return cls(time.monotonic() + seconds)

    @property
    def spent(self) -> bool:
        """Return whether nothing more should begin: the time is over, or a signal requests the end."""
        return asked_to_end() or time.monotonic() >= self.until


def say(text: str) -> None:
    """Print progress to stderr, apart from the result."""
    Console(stderr=True).print(text, highlight=False, markup=False, soft_wrap=True)


def reason(error: Exception) -> str:
    """Return in one line why a row is missing."""
    if is_out_of_memory(error):
        gc.collect()  # cycles may hold what did fit
        return NO_MEMORY
    return f"{type(error).__name__}: {one_line(error)[:300]}"


@contextmanager
def one_stream(device: "torch.device") -> Iterator[None]:
    """Run all work of the block on a stream that can be captured.

    Autograd runs a backward pass on the stream of its forward pass: on the default one it could not be captured.
    """
    if device.type != "cuda":
        yield
        return
    import torch

    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream(device).wait_stream(stream)


@contextmanager
def ending_early() -> Iterator[None]:
    """Spend every `Budget` on SIGTERM or Ctrl-C in a block of the main thread, so that measured rows are written.

    Preempted or KeyboardInterrupt at the end of the block, if SIGTERM or SIGINT came.
    """
    with StopSignal(TOLD, ENDED) as stop:
        _under_way.append(stop)
        try:
            yield
        finally:
            _under_way.remove(stop)
    if stop.signal is not None:
        raise KeyboardInterrupt(WRITTEN) if stop.signal == signal.SIGINT else Preempted(WRITTEN)


def asked_to_end() -> bool:
    """Return whether a signal arrived in an active block of `ending_early`."""
    if threading.current_thread() is threading.main_thread():
        for stop in _under_way:
            stop.arm()  # anew: what compiles has handlers of its own
    return any(stop.signal is not None for stop in _under_way)
