"""Commands side by side on the GPUs of this machine, each with its share of the processor."""

import math
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from benchmarks.harness.time_limit import Limit
from fullstride.errors import PeerError, Preempted
from fullstride.launch.attempts import POLL, Attempt
from fullstride.launch.gpus import VISIBLE
from fullstride.launch.processes import alone
from fullstride.launch.words import Words
from fullstride.process import exit_codes
from fullstride.runs.atomic_files import note

# Of a log, from whose end the reason of a failure is taken.
TAIL_BYTES = 4096
# Of the time that a limit reserves for saving, what this process keeps for itself at the end.
OWN = 0.25


@dataclass(frozen=True)
class Task:
    """A command.

    Attributes:
        name: of its log.
        words: as `fullstride launch` takes them; it takes `--limit SECONDS`, by whose end it has saved and left.
        least: seconds below which it is not worth beginning, as its start alone takes them.

    """

    name: str
    words: Words
    least: float = 0.0


@dataclass(frozen=True)
class Failure:
    """How a command ended that has failed.

    Attributes:
        code: its exit code.
        text: which, why, and the last line of its log.

    """

    code: int
    text: str


@dataclass
class Lane:
    """A GPU, its cores, and the process that has both.

    Attributes:
        gpu: as CUDA_VISIBLE_DEVICES names it.
        cores: of the processor; empty where the system has no affinities.
        task: what runs here.
        attempt: its process.
        usable: until a command has failed here.
        since: when it was started.
        log: its output.
        begin: where in the log that begins.

    """

    gpu: str
    cores: frozenset[int]
    task: Task | None = None
    attempt: Attempt | None = None
    usable: bool = True
    since: float = 0.0
    log: Path = Path()
    begin: int = 0

    @property
    def free(self) -> bool:
        """Whether a command may be started here."""
        return self.usable and self.task is None

    def start(self, task: Task, log: Path, limit: float) -> None:
        """Start a command, whose output goes to the end of its log."""
        words = list(task.words)
        if limit < math.inf:
            words += ["--limit", str(math.floor(limit))]
        self.begin = log.stat().st_size if log.is_file() else 0
        with log.open("ab") as output:
            self.attempt = Attempt(alone(words), {VISIBLE: self.gpu}, output=output)
        self.task, self.since, self.log = task, time.monotonic(), log
        if self.cores:
            self.attempt.keep_to(self.cores)
        note(f"{task.name}: on GPU {self.gpu}, {len(self.cores) or 'all'} cores, {log}")

    def finished(self, over: bool) -> Failure | None:
        """Whether what ran here has failed since it was asked last; the GPU is free for another then, or given up.

        A signal is no failure where the time is `over`.
        """
        if self.task is None or self.attempt is None or not self.attempt.has_ended:
            return None
        task, ended = self.task, self.attempt.wait()
        why = "out of time, killed as it did not leave" if ended.late else ended.why
        note(f"{task.name}: {why} after {time.monotonic() - self.since:.0f} s")
        self.task = self.attempt = None
        if ended.code == exit_codes.DONE or (over and ended.code in (-signal.SIGTERM, -signal.SIGKILL)):
            return None
        self.usable = False
        with self.log.open("rb") as file:
            file.seek(max(self.begin, self.log.stat().st_size - TAIL_BYTES))
            lines = file.read().decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "it has said nothing")
        return Failure(ended.code, f"{task.name}: {ended.why} ({self.log}: {last})")


def _each_before_any_twice(gpus: Sequence[str]) -> list[str]:
    """0, 0, 1, 1 as 0, 1, 0, 1: few commands take as many GPUs as there are."""
    times = [list(gpus[:i]).count(gpu) for i, gpu in enumerate(gpus)]
    return [gpu for _, gpu in sorted(zip(times, gpus, strict=True), key=lambda pair: pair[0])]


def run_side_by_side(tasks: Sequence[Task], gpus: Sequence[str], logs: Path, limit: Limit) -> list[str]:
    """Run commands in their order, each on the GPU that is free first, until all have ended.

    A GPU on which a command has failed is given no other: what is wrong may be the GPU.

    Args:
        tasks: the commands; their names differ.
        gpus: as of `gpus.gpus_of`; one that is there twice runs two at a time, if there are more commands than GPUs.
        logs: folder of their output, NAME.log.
        limit: of the whole. Each command is given what is left of it, and is not begun where that is too little; one
            that has not left by then is killed.

    Returns:
        The names of those that were not begun, for want of time.

    Raises:
        PeerError: if commands failed, after all others have ended: which, why, and the last lines of their logs.
        Preempted, KeyboardInterrupt: after a SIGTERM or a Ctrl-C was passed on and all have saved and ended.

    """
    if not tasks:
        return []
    logs.mkdir(parents=True, exist_ok=True)
    until, waiting, failures = limit.until - OWN * limit.reserve, list(tasks), []
    gpus = _each_before_any_twice(gpus)[: len(tasks)]
    lanes = [Lane(gpu, cores) for gpu, cores in zip(gpus, shares(len(gpus)), strict=True)]
    with _passing_on(lanes) as told:
        while True:
            over = time.monotonic() >= until - limit.reserve
            failures += [failure for lane in lanes if (failure := lane.finished(over))]
            broken = {lane.gpu for lane in lanes if not lane.usable}
            for lane in lanes:
                left = until - time.monotonic()
                task = next((task for task in waiting if left >= max(task.least + limit.reserve, 1)), None)
                if lane.free and lane.gpu not in broken and task and not told:
                    waiting.remove(task)
                    lane.start(task, logs / f"{task.name}.log", left)
                    if told and lane.attempt:  # the signal came before there was a process to pass it on to
                        lane.attempt.stop(told[0])
                elif left < 0 and lane.attempt is not None:
                    lane.attempt.kill()
            if all(lane.task is None for lane in lanes):
                break
            time.sleep(POLL)
    _tell(failures, [task.name for task in waiting], told)
    return [task.name for task in waiting]


def _tell(failures: list[Failure], waiting: list[str], told: list[int]) -> None:
    """Raise what there is to be told."""
    # A process that was told to end has saved, or had nothing to save yet.
    obeyed = (exit_codes.INTERRUPTED, *(-number for number in told))
    lost = [failure.text for failure in failures if not (told and failure.code in obeyed)]
    begun = f"; not begun: {', '.join(waiting)}" if waiting else ""
    if lost:
        raise PeerError(f"{'; '.join(lost)}{begun}; the same command goes on, --collect gathers what there is")
    if told and told[0] == signal.SIGINT:
        raise KeyboardInterrupt(f"stopped{begun}; the same command goes on")
    if told:
        raise Preempted(f"stopped{begun}; the same command goes on")


def shares(count: int) -> list[frozenset[int]]:
    """The cores of this process in `count` parts, neighbours together; parts overlap where there are too few cores."""
    if not hasattr(os, "sched_getaffinity"):
        return [frozenset()] * count
    mine = sorted(os.sched_getaffinity(0), key=_place)
    if len(mine) < count:
        return [frozenset(mine)] * count
    bounds = [round(len(mine) * part / count) for part in range(count + 1)]
    return [frozenset(mine[low:high]) for low, high in pairwise(bounds)]


def _place(cpu: int) -> tuple[int, int, int]:
    """Package and core of a processor: two threads of one core belong to one part."""
    topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
    try:
        package, core = (int((topology / name).read_text()) for name in ("physical_package_id", "core_id"))
    except (OSError, ValueError):
        return 0, cpu, cpu
    return package, core, cpu


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
        left = [lane.attempt for lane in lanes if lane.attempt is not None]
        for attempt in left:
            attempt.stop()
        for attempt in left:
            attempt.end()
            attempt.wait()
        for number, handler in before.items():
            signal.signal(number, handler)
