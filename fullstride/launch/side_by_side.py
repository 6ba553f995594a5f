"""Commands side by side on the GPUs of this machine: one on each at a time, each with its share of the processor."""

import math
import os
import signal
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from fullstride import exits
from fullstride.errors import ConfigError, PeerError, Preempted
from fullstride.files import note
from fullstride.launch.attempts import POLL, Attempt
from fullstride.launch.processes import alone
from fullstride.launch.words import Words

VISIBLE = "CUDA_VISIBLE_DEVICES"
# Of a log, from whose end the reason of a failure is taken.
TAIL_BYTES = 4096


@dataclass(frozen=True)
class Task:
    """A command.

    Attributes:
        name: of its log.
        words: behind `fullstride`.
        limited: whether it takes `--limit SECONDS`, after which it saves and leaves.

    """

    name: str
    words: Words
    limited: bool = False


@dataclass
class Lane:
    """A GPU, its cores, and the process that has both.

    Attributes:
        gpu: as CUDA_VISIBLE_DEVICES names it.
        cores: of the processor; empty where the system has no affinities.

    """

    gpu: str
    cores: frozenset[int]
    task: Task | None = None
    attempt: Attempt | None = None
    since: float = 0.0

    def start(self, task: Task, log: Path, limit: float) -> None:
        """Start a command, whose output goes to the end of its log."""
        words = [*task.words, "--limit", f"{limit:.0f}"] if task.limited and limit < math.inf else list(task.words)
        with log.open("ab") as output:
            self.attempt = Attempt(alone(words), {VISIBLE: self.gpu}, output=output)
        self.task, self.since = task, time.monotonic()
        if self.cores:
            self.attempt.keep_to(self.cores)
        note(f"{task.name}: on GPU {self.gpu}, {len(self.cores) or 'all'} cores, {log}")

    def finished(self) -> tuple[Task, int] | None:
        """What has ended since it was asked last, and its exit code."""
        if self.task is None or self.attempt is None or not self.attempt.has_ended:
            return None
        task, code = self.task, self.attempt.wait().code
        note(f"{task.name}: {_outcome(code)} after {time.monotonic() - self.since:.0f} s")
        self.task = self.attempt = None
        return task, code


def gpus_of(text: str) -> list[str]:
    """GPUs as the command line names them, `0,1`, as CUDA_VISIBLE_DEVICES would; numbers count those that are visible.

    Raises:
        ConfigError: if there is none, one twice, or a number that is not among the visible ones.

    """
    named = [part.strip() for part in text.split(",")]
    if not all(named) or len(set(named)) < len(named):
        raise ConfigError(f"--gpus {text}: expected numbers of GPUs, each once, as in 0,1")
    visible = [part.strip() for part in os.environ.get(VISIBLE, "").split(",") if part.strip()]
    if not visible:
        return named
    beyond = [name for name in named if name.isdigit() and int(name) >= len(visible)]
    if beyond:
        raise ConfigError(
            f"--gpus {text}: {VISIBLE}={','.join(visible)} has no {beyond[0]}; numbers count from 0 in it"
        )
    return [visible[int(name)] if name.isdigit() else name for name in named]


def run_side_by_side(tasks: Sequence[Task], gpus: Sequence[str], logs: Path, limit: float = math.inf) -> None:
    """Run commands in their order, each on the GPU that is free first, until all have ended.

    Args:
        tasks: the commands; their names differ.
        gpus: as of `gpus_of`.
        logs: folder of their output, NAME.log.
        limit: seconds after which no command is begun; those that take a limit are given what is left of it.

    Raises:
        PeerError: if commands failed, after all others have ended: which, and the last lines of their logs.
        Preempted, KeyboardInterrupt: after a SIGTERM or a Ctrl-C was passed on and all have saved and ended.

    """
    logs.mkdir(parents=True, exist_ok=True)
    until, waiting, failed = time.monotonic() + limit, deque(tasks), []
    lanes = [Lane(gpu, cores) for gpu, cores in zip(gpus, shares(len(gpus)), strict=True)]
    with _passing_on(lanes) as told:
        while True:
            failed += [end for lane in lanes if (end := lane.finished()) and end[1] != exits.DONE]
            for lane in lanes:
                left = until - time.monotonic()
                if lane.task is None and waiting and not told and left >= 1:
                    task = waiting.popleft()
                    lane.start(task, logs / f"{task.name}.log", left)
            if all(lane.task is None for lane in lanes):
                break
            time.sleep(POLL)
    if told:
        _leave(told[0])
    if waiting:
        note(f"not begun, its time was over: {', '.join(task.name for task in waiting)}; the same command goes on")
    if failed:
        raise PeerError("; ".join(f"{task.name}: {_outcome(code)}: {_last_line(logs, task)}" for task, code in failed))


def shares(count: int) -> list[frozenset[int]]:
    """The cores of this process in `count` parts, neighbours together; parts overlap where there are too few cores."""
    if not hasattr(os, "sched_getaffinity"):
        return [frozenset()] * count
    mine = sorted(os.sched_getaffinity(0))
    if len(mine) < count:
        return [frozenset(mine)] * count
    bounds = [round(len(mine) * part / count) for part in range(count + 1)]
    return [frozenset(mine[low:high]) for low, high in pairwise(bounds)]


@contextmanager
def _passing_on(lanes: list[Lane]) -> Iterator[list[int]]:
    """SIGTERM and Ctrl-C go to every process, and are remembered; none is left behind, whatever ends the block."""
    told: list[int] = []

    def pass_on(number: int, _: object) -> None:
        told.append(number)
        for lane in lanes:
            if lane.attempt is not None and not lane.attempt.has_ended:
                lane.attempt.stop(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for lane in lanes:
            if lane.attempt is not None:
                lane.attempt.end()
                lane.attempt.wait()


def _leave(number: int) -> None:
    if number == signal.SIGINT:
        raise KeyboardInterrupt("stopped; the same command goes on")
    raise Preempted("stopped; the same command goes on")


def _outcome(code: int) -> str:
    return "ended" if code == exits.DONE else f"exit code {code}"


def _last_line(logs: Path, task: Task) -> str:
    path = logs / f"{task.name}.log"
    lines = path.read_bytes()[-TAIL_BYTES:].decode(errors="replace").split("\n")
    return f"{path}: {next((line.strip() for line in reversed(lines) if line.strip()), 'empty')}"
