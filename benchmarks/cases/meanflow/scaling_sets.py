"""Sets of processes of the bench of several GPUs: as many as there are GPUs, one set a network and ratio.

All sets start and compile at once, which takes minutes; then each has the machine to itself. Every process says when it
is ready and waits for the word; the first one of a set tells each row as soon as it is known.
"""

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from benchmarks.cases.meanflow.options import ScalingOptions
from benchmarks.cases.meanflow.scaling_steps import Measured
from benchmarks.cases.meanflow.scaling_workers import DONE, Job, work
from benchmarks.harness.budget import NO_TIME, Budget, say
from benchmarks.harness.workers import DEAD, GO, GRACE, READY, Worker, speaking
from fullstride.errors import PeerError

UNFINISHED = "the bench was ended before"
# Of the bench's time, the part in which sets must be ready: those that are not are left out, the others still timed.
COMPILING = 0.75
# How long to wait for the others' words where one has failed: theirs may tell why.
LAST_WORDS = 5.0


@dataclass
class Found:
    """What a set has measured so far, and why not all.

    Attributes:
        job: the set's.
        rows: measured.
        errors: of each kind's steps, beside eager fp32.
        ready_s: from the start of the processes until they had compiled; None of one that has not.
        why: there are no more rows; empty where all are there.

    """

    job: Job
    rows: list[Measured] = field(default_factory=list)
    errors: dict[str, float] = field(default_factory=dict)
    ready_s: float | None = None
    why: str = UNFINISHED


class Set:
    """Processes of one job."""

    def __init__(self, job: Job, options: ScalingOptions, size: int, beside: int):
        """Start them; `beside` of them share the processor."""
        self.found, self._began = Found(job), time.monotonic()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.workers = []
        for rank in range(size):
            numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size}
            given = numbers | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            self.workers.append(Worker(work, given, job, options, beside))

    def tell(self, word: Any) -> None:
        """Say something to every process that lives."""
        for each in self.workers:
            each.tell(word)

    def hear(self, word: str, until: float, take: Callable[[Any], None]) -> bool:
        """Wait until every process has said a word, and take what else is told; if one fails, all are ended.

        Args:
            word: that they say, or in its place why not.
            until: seconds of the monotonic clock.
            take: what to do with anything that is no word.

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
        wrong = [told for told in said.values() if told != word]
        if not wrong and len(said) == len(self.workers):
            return True
        self.end()  # the others would wait for those
        own = [told for told in wrong if not told.startswith(PeerError.__name__) and told != DEAD]
        self.found.why = next(iter(own or wrong), NO_TIME)
        return False

    def get_ready(self, until: float) -> bool:
        """Whether all have compiled in time."""
        if not self.hear(READY, until, self.found.errors.update):
            return False
        self.found.ready_s = time.monotonic() - self._began
        return True

    def measure(self, until: float, keep: Callable[[Found], None]) -> None:
        """Give them the machine, and hand over what is found with each new row."""

        def take(row: Measured) -> None:
            self.found.rows.append(row)
            keep(self.found)

        self.tell(GO)
        if self.hear(DONE, until, take):
            self.found.why = ""
        for each in self.workers:
            each.process.join(timeout=30)
        self.end()

    def end(self) -> None:
        """End those that still run."""
        for each in self.workers:
            each.end()


@contextmanager
def started(jobs: list[Job], options: ScalingOptions, size: int) -> Iterator[list[Set]]:
    """Their sets, which prepare what needs no GPU until they are told the machine's rates."""
    sets: list[Set] = []
    try:
        sets += [Set(job, options, size, size * len(jobs)) for job in jobs]
        yield sets
    finally:
        for each in sets:
            each.end()


def run_sets(sets: list[Set], budget: Budget, keep: Callable[[Found], None]) -> None:
    """Wait until all have compiled, and time one after the other."""
    say(f"compiling: {'; '.join(each.found.job.name for each in sets)}")
    now = time.monotonic()
    by = now + COMPILING * max(0.0, budget.until - now)
    ready = [each for each in sets if each.get_ready(by)]
    for each in ready:
        if budget.spent:
            each.found.why = NO_TIME
            each.end()
        else:
            say(f"timing: {each.found.job.name}, ready after {each.found.ready_s:.0f} s")
            each.measure(budget.until + GRACE, keep)
