"""Commands run in parallel on the GPUs of this machine, each with its share of the CPU cores."""

import math
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from benchmarks.experiments.visible_gpus import gpus_of
from benchmarks.harness.time_limit import Limit
from fullstride.errors import ConfigError, PeerError, Preempted
from fullstride.launch.attempts import POLL, Attempt
from fullstride.launch.gpus import VISIBLE
from fullstride.launch.processes import single_command
from fullstride.launch.words import Words
from fullstride.process import exit_codes
from fullstride.runs.atomic_files import note

# Bytes at the end of a log that are searched for the reason of a failure.
TAIL_BYTES = 4096
# Share of the time reserved for saving that this process keeps for itself at the end.
OWN = 0.25


@dataclass(frozen=True)
class Task:
    """Command to run."""

    name: str  # of its log
    words: Words  # as `fullstride launch` takes them; it takes `--limit SECONDS`, by whose end it has saved and left
    least: float = 0.0  # seconds below which it is not worth beginning, as its start alone takes them


Lane = tuple[str, frozenset[int]]
# The exit code of a command that has failed, and which, why, and the last line of its log.
Failure = tuple[int, str]


class Running:
    """Running command with a GPU, cores, and the end of a log of its own."""

    def __init__(self, task: Task, lane: Lane, log: Path, limit: float):
        """Start the command; `cores` is empty if the system has no CPU affinities."""
        gpu, cores = lane
        words = [*task.words, *(["--limit", str(math.floor(limit))] if limit < math.inf else [])]
        self.task = task
        self.log = log
        self._begin = log.stat().st_size if log.is_file() else 0
        self._since = time.monotonic()
        with log.open("ab") as output:
            self.attempt = Attempt(single_command(words), {VISIBLE: gpu}, output=output)
        if cores:
            self.attempt.keep_to(cores)
        note(f"{task.name}: on GPU {gpu}, {len(cores) or 'all'} cores, {log}")

    def failure(self, over: bool) -> Failure | None:
        """Return the failure of an ended command; a signal is no failure if the time is `over`."""
        ended = self.attempt.wait()
        why = "out of time, killed because it did not exit" if ended.late else ended.why
        note(f"{self.task.name}: {why} after {time.monotonic() - self._since:.0f} s")
        if ended.code == exit_codes.DONE or (over and ended.code in (-signal.SIGTERM, -signal.SIGKILL)):
            return None
        with self.log.open("rb") as file:
            file.seek(max(self._begin, self.log.stat().st_size - TAIL_BYTES))
            lines = file.read().decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
        return ended.code, f"{self.task.name}: {ended.why} ({self.log}: {last})"


def run_side_by_side(tasks: Sequence[Task], gpus: Sequence[str], logs: Path, limit: Limit) -> list[str]:
    """Run commands in their order, each on the GPU that is free first, until all have ended.

    A GPU on which a command has failed gets no other command, because the GPU may be faulty.

    A GPU that is named twice runs two at a time, if there are more commands than GPUs. Each command gets the rest
    of the time, is not begun if that is too little, and is killed if it has not exited by then. Return the names of
    those that were not begun. PeerError if commands failed, after all others have ended: which, why, and the last
    lines of their logs. Preempted or KeyboardInterrupt after a stop signal was passed on and all have saved and
    ended.
    """
    if not tasks:
        return []
    logs.mkdir(parents=True, exist_ok=True)
    until, waiting = limit.until - OWN * limit.reserve, list(tasks)
    failures, broken, running = list[Failure](), set[str](), dict[int, Running]()
    # 0, 0, 1, 1 as 0, 1, 0, 1: few commands take as many GPUs as there are.
    times = [list(gpus[:i]).count(gpu) for i, gpu in enumerate(gpus)]
    gpus = [gpu for _, gpu in sorted(zip(times, gpus, strict=True), key=lambda pair: pair[0])][: len(tasks)]
    lanes = list(zip(gpus, shares(len(gpus)), strict=True))
    with _passing_on(running) as told:
        while True:
            over = time.monotonic() >= until - limit.reserve
            for place in [place for place, one in running.items() if one.attempt.has_ended]:
                if (failure := running.pop(place).failure(over)) is not None:
                    failures.append(failure)
                    broken.add(lanes[place][0])
            for place, lane in enumerate(lanes):
                left = until - time.monotonic()
                task = next((task for task in waiting if left >= max(task.least + limit.reserve, 1)), None)
                if place in running:
                    if left < 0:
                        running[place].attempt.kill()
                elif lane[0] not in broken and task and not told:
                    waiting.remove(task)
                    running[place] = Running(task, lane, logs / f"{task.name}.log", left)
                    if told:  # the signal came before there was a process to pass it on to
                        running[place].attempt.stop(told[0])
            if not running:
                break
            time.sleep(POLL)
    _tell(failures, [task.name for task in waiting], told)
    return [task.name for task in waiting]


def spread(
    gpus: str, tasks: Sequence[Task], runs: Path, collect: bool, limit: Limit, *, device: str, shared: bool = False
) -> None:
    """Run commands of `python -m benchmarks` on the GPUs, and return once all of them have ended.

    Their logs are in `runs/logs`. Several may share a GPU if they are `shared`, because none has a time budget.
    ConfigError if GPUs are invalid or absent, or --collect is given, too. PeerError if a command failed, Preempted
    or KeyboardInterrupt if this process received a stop signal, after all have ended.
    """
    if collect:
        raise ConfigError(f"--gpus {gpus} --collect: --collect runs nothing; remove one of the two")
    found = gpus_of(gpus, shared)
    if device == "cpu":
        note(
            f"--gpus {gpus}: device=cpu: each training uses its share of the cores and no GPU; use --scale gpu for GPUs"
        )
    if begun_not := run_side_by_side(tasks, found, runs / "logs", limit):
        note(f"--limit {limit.seconds:g}: no time left for {', '.join(begun_not)}; run the same command to resume")


def _tell(failures: list[Failure], waiting: list[str], told: list[int]) -> None:
    """Raise the failures, or the stop signal that was received."""
    # A process that was told to end has saved, or had nothing to save yet.
    obeyed = (exit_codes.INTERRUPTED, *(-number for number in told))
    lost = [text for code, text in failures if not (told and code in obeyed)]
    begun = f"; not begun: {', '.join(waiting)}" if waiting else ""
    if lost:
        raise PeerError(f"{'; '.join(lost)}{begun}; run the same command to resume, or --collect for the finished runs")
    if told and told[0] == signal.SIGINT:
        raise KeyboardInterrupt(f"stopped{begun}; run the same command to resume")
    if told:
        raise Preempted(f"stopped{begun}; run the same command to resume")


def shares(count: int) -> list[frozenset[int]]:
    """Divide this process's cores into `count` parts of neighbours; parts overlap if there are too few cores."""
    if not hasattr(os, "sched_getaffinity"):
        return [frozenset()] * count
    mine = sorted(os.sched_getaffinity(0), key=_place)
    if len(mine) < count:
        return [frozenset(mine)] * count
    bounds = [round(len(mine) * part / count) for part in range(count + 1)]
    return [frozenset(mine[low:high]) for low, high in pairwise(bounds)]


def _place(cpu: int) -> tuple[int, int, int]:
    """Return the package and core of a CPU, so that two threads of one core are in one part."""
    topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
    try:
        package, core = (int((topology / name).read_text()) for name in ("physical_package_id", "core_id"))
    except (OSError, ValueError):
        return 0, cpu, cpu
    return package, core, cpu


@contextmanager
def _passing_on(running: dict[int, Running]) -> Iterator[list[int]]:
    """Pass SIGTERM and Ctrl-C on to every process and record them; no process survives the block."""
    told: list[int] = []

    def pass_on(number: int, _: object) -> None:
        told.append(number)
        for one in list(running.values()):
            if not one.attempt.has_ended:
                one.attempt.stop(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield told
    finally:
        for one in running.values():
            one.attempt.stop()
        for one in running.values():
            one.attempt.end()
            one.attempt.wait()
        for number, handler in before.items():
            signal.signal(number, handler)
