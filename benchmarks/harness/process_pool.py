"""Processes of a benchmark that compile in parallel and are timed in turns: teams with one job each.

Each process sends `READY` once it has compiled and waits for `GO`; then its team has the device and the processor to
itself. Other messages before its end are its results.
"""

import math
import os
import signal
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

from benchmarks.harness.budget import NO_TIME, reason
from fullstride.device.select import cores
from fullstride.errors import PeerError

READY, GO, DONE = "ready", "go", "done"
# Message of a process that ended without sending one.
DEAD = "a process of it has ended"
UNFINISHED = "the bench was ended before"
# Seconds that a bench may take beyond its time before its processes are ended.
GRACE = 60.0
# How long to wait for the others' words where one has failed: theirs may tell why.
LAST_WORDS = 5.0
Take = Callable[[Any], None]


class Worker:
    """Process with a line of messages."""

    def __init__(self, work: Callable[..., None], *given: Any):
        """Start the process: `work` is called with its end of the line, then with the given arguments."""
        context = get_context("spawn")
        self.line, theirs = context.Pipe()
        self.process = context.Process(target=_begin, args=(work, theirs, *given), daemon=True)
        self.process.start()
        theirs.close()

    def tell(self, word: Any) -> None:
        """Send it a message; if it has ended, `heard` reports that."""
        try:
            self.line.send(word)
        except OSError:
            return

    def heard(self) -> Any:
        """Return the process's next message, or `DEAD`."""
        try:
            return self.line.recv()
        except (EOFError, OSError):
            return DEAD

    def end(self) -> None:
        """End the process if it still runs, which frees its resources."""
        self.process.kill()
        self.process.join()


def _begin(work: Callable[..., None], parent: Connection, *given: Any) -> None:
    """Ignore a terminal's Ctrl-C in a worker, because the parent process ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        work(parent, *given)
    except Exception as error:
        parent.send(reason(error))
    else:
        parent.send(DONE)


def speaking(workers: Collection[Worker], until: float) -> list[Worker]:
    """Return the workers with a message; none if none has one by `until`, in seconds of the monotonic clock."""
    timeout = None if until == math.inf else max(0.0, until - time.monotonic())
    there = wait([each.line for each in workers], timeout)
    return [each for each in workers if each.line in there]


class Team:
    """Team of workers for one job."""

    def __init__(self, workers: Sequence[Worker]):
        """Take workers that have just started."""
        self.workers = list(workers)
        self.why = UNFINISHED  # there are no more findings; empty once all are there
        self.ready_s = None  # seconds from the start until all had compiled; None of one that has not
        self._began = time.monotonic()

    def tell(self, word: Any) -> None:
        """Send a message to every live process."""
        for each in self.workers:
            each.tell(word)

    def hear(self, word: str, until: float, take: Take) -> bool:
        """Wait for one message from every process and handle others; if one fails, end all.

        The word is `READY` or `DONE`; a team that is done early has nothing left to do. `until` is in seconds
        of the monotonic clock.
        """
        said: dict[Worker, str] = {}
        while missing := [each for each in self.workers if each not in said]:
            if not (there := speaking(missing, until)):
                break
            for worker in there:
                told = worker.heard()
                if not isinstance(told, str):
                    take(told)
                    continue
                said[worker] = told
                if told != word:
                    until = min(until, time.monotonic() + LAST_WORDS)
        if len(said) == len(self.workers) and set(said.values()) <= {word, DONE}:
            self.why = "" if DONE in said.values() else self.why
            return word in said.values()
        self.end()  # the others would wait for those
        wrong = [told for told in said.values() if told not in (word, DONE)]
        own = [told for told in wrong if not told.startswith(PeerError.__name__) and told != DEAD]
        self.why = next(iter(own or wrong), NO_TIME)
        return False

    def get_ready(self, until: float, take: Take) -> bool:
        """Return whether all have compiled in time and wait for their turn."""
        if not self.hear(READY, until, take):
            return False
        self.ready_s = time.monotonic() - self._began
        return True

    def measure(self, until: float, take: Take) -> None:
        """Let the workers measure, and pass on their results."""
        self.tell(GO)
        if self.hear(DONE, until, take):
            for each in self.workers:
                each.process.join(timeout=GRACE)
        self.end()

    def end(self) -> None:
        """End the workers that still run."""
        for each in self.workers:
            each.end()


@contextmanager
def none_left(teams: list[Team]) -> Iterator[list[Team]]:
    """End the teams in the list at the end of a block."""
    try:
        yield teams
    finally:
        for each in teams:
            each.end()


def share_cores(beside: int) -> None:
    """Limit the cores of a worker to its share, so that the others can compile."""
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(1, cores() // beside)))


def await_turn(parent: Connection) -> None:
    """Report that a worker has compiled, and return when it is its turn."""
    parent.send(READY)
    parent.recv()
