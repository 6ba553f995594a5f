"""Processes of a bench that compile beside each other and are timed in turns.

Each says `READY` once it has compiled and waits for `GO`; then it has the device and the processor to itself.
"""

import math
import os
import signal
import time
from collections.abc import Callable, Collection
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

from fullstride.device.select import cores

READY, GO = "ready", "go"
# What is heard of a process that has ended.
DEAD = "a process of it has ended"
# Seconds that a bench may take beyond its time before its processes are ended.
GRACE = 60.0


class Worker:
    """A process, and what it says."""

    def __init__(self, work: Callable[..., None], *given: Any):
        """Start it: `work` is called with its end of the line, then with what is given."""
        context = get_context("spawn")
        self.line, theirs = context.Pipe()
        self.process = context.Process(target=_begin, args=(work, theirs, *given), daemon=True)
        self.process.start()
        theirs.close()

    def tell(self, word: Any) -> None:
        """Say something to it; where it has ended, that is heard of."""
        try:
            self.line.send(word)
        except OSError:
            return

    def heard(self) -> Any:
        """What it says next, or `DEAD`."""
        try:
            return self.line.recv()
        except (EOFError, OSError):
            return DEAD

    def end(self) -> None:
        """End it, if it still runs; what it held is free then."""
        self.process.kill()
        self.process.join()


def _begin(work: Callable[..., None], *given: Any) -> None:
    """In a worker: a terminal's Ctrl-C is for the process that started it, which ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    work(*given)


def speaking(workers: Collection[Worker], until: float) -> list[Worker]:
    """Those that have something to say; none if none has until then, in seconds of the monotonic clock."""
    timeout = None if until == math.inf else max(0.0, until - time.monotonic())
    there = wait([each.line for each in workers], timeout)
    return [each for each in workers if each.line in there]


def share_cores(beside: int) -> None:
    """In a worker: leave the compilers of the others their part of the processor."""
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(1, cores() // beside)))


def await_turn(parent: Connection) -> None:
    """In a worker: all is compiled; return when it is its turn."""
    parent.send(READY)
    parent.recv()
