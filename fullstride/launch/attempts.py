"""Attempts at a command in processes of their own: each with a time limit, and another one if that can help."""

import contextlib
import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import IO

from fullstride.launch.words import Words, resumed
from fullstride.process import exit_codes
from fullstride.process.parent import LAUNCHER
from fullstride.runs.atomic_files import note

# Seconds that a process has to save after a request to stop.
SAVING = 120.0
POLL = 0.1
REASONS = {
    exit_codes.DONE: "done",
    exit_codes.FAILED: "failed; its last lines say why",
    exit_codes.SETTINGS: "an invalid setting",
    exit_codes.OUT_OF_MEMORY: "out of memory: the same settings will not fit either",
    exit_codes.UNREAD: "data that could not be read",
    exit_codes.STUCK: "stuck, and ended by its watchdog",
    exit_codes.INTERRUPTED: "interrupted",
} | dict.fromkeys(
    (-signal.SIGKILL, 128 + signal.SIGKILL), "killed (SIGKILL), most often by the system because memory ran out"
)


@dataclass(frozen=True)
class Outcome:
    """Outcome of an attempt.

    Attributes:
        code: exit code; a negative one is the signal that ended the process.
        why: reason, for people.
        told: whether somebody outside asked it to stop.
        late: whether its time limit was over.

    """

    code: int
    why: str
    told: bool = False
    late: bool = False

    @property
    def again(self) -> bool:
        """True if another attempt may end differently."""
        return not self.told and (self.late or self.code not in exit_codes.FINAL)


class Attempt:
    """Process of one attempt, which can be asked to save and end, even by a signal handler."""

    def __init__(
        self,
        line: list[str],
        env: dict[str, str] | None = None,
        cwd: str | None = None,
        output: IO[bytes] | None = None,
    ):
        """Start a command line.

        Args:
            line: program and arguments.
            env: additional environment variables.
            cwd: working folder, if not this process's.
            output: file for stdout and stderr, instead of this process's.

        """
        self._told = self._late = False
        given = os.environ | {LAUNCHER: str(os.getpid())} | (env or {})
        # Slurm's warning goes to every process of a job, and would kill those that know nothing of it. A process that
        # is started inherits what is blocked; the one that launches gets its signal afterwards, and acts for both.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
        try:
            self._process = subprocess.Popen(line, env=given, cwd=cwd, stdout=output, stderr=output)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    @property
    def has_ended(self) -> bool:
        """True once the process has ended; `wait` returns at once then."""
        try:
            return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True

    def keep_to(self, cores: Iterable[int]) -> None:
        """Pin the process and its future children to these CPU cores."""
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(self._process.pid, cores)

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Ask it to save and end, on behalf of somebody outside."""
        self._told = True
        self._process.send_signal(number)

    def kill(self) -> None:
        """Kill it at once."""
        self._late = True
        self._process.kill()

    def wait(self, seconds: float = 0.0) -> Outcome:
        """Wait for its end, and ask it to end after `seconds`; 0 waits for ever."""
        if not self._ends_within(seconds or math.inf):
            self._late = True
            self.end()
        code = self._process.wait()
        why = (
            f"its time limit of {seconds / 3600:g} h is over" if self._late else REASONS.get(code, f"exit code {code}")
        )
        return Outcome(code, why, self._told, self._late)

    def end(self, seconds: float = SAVING, *, told: bool = False) -> None:
        """Ask it to save and end, and kill it after `seconds`; `told` if the request comes from outside."""
        self._told |= told
        self._process.terminate()
        if not self._ends_within(seconds):
            self._process.kill()
            self._ends_within(SAVING)

    def _ends_within(self, seconds: float) -> bool:
        # Popen.wait holds a lock, which the handler of a signal that comes meanwhile would wait for in vain.
        end = time.monotonic() + seconds
        while not self.has_ended:
            if time.monotonic() >= end:
                return False
            time.sleep(POLL)
        return True


@contextmanager
def _handled(numbers: Iterable[int], act: Callable[[int], None]) -> Iterator[None]:
    """Call `act` for these signals; in a thread, which receives none, change nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, lambda given, _: act(given)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def attempt_all(
    words: Words,
    line: Callable[[Words], list[str]],
    *,
    retries: int,
    delay: float,
    seconds: float,
    again: bool = False,
    start: Callable[[list[str]], Attempt] = Attempt,
) -> Outcome:
    """Attempt a command until it ends in a way that another attempt cannot better.

    Args:
        words: words of the command.
        line: function from words to a command line.
        retries: number of attempts after the first one.
        delay: seconds before each of them.
        seconds: time limit of each attempt; 0 means no limit.
        again: whether an earlier launch has begun the run, so that the first attempt resumes it.
        start: function that starts a command line.

    Returns:
        Outcome of the last attempt.

    """
    attempt = 0
    while True:
        attempt += 1
        process = start(line(resumed(words) if again or attempt > 1 else words))
        # The process takes a Ctrl-C that a terminal sends to both for one.
        with _handled((signal.SIGTERM, signal.SIGINT), process.stop):
            ended = process.wait(seconds)
        if not ended.again:
            return ended
        note(f"launch: attempt {attempt} of {retries + 1} ended with exit code {ended.code}: {ended.why}")
        if attempt > retries:
            return ended
        note(f"launch: next attempt in {delay:g} s")
        if not _waits(delay):
            note("launch: SIGTERM: no further attempt; to continue, run the same command with resume=true")
            return replace(ended, told=True)


def _waits(seconds: float) -> bool:
    """Wait; return False, at once, if SIGTERM came."""
    told: list[int] = []
    end = time.monotonic() + seconds
    with _handled([signal.SIGTERM], told.append):
        while not told and time.monotonic() < end:
            time.sleep(POLL)
    return not told


def exit_code(ended: Outcome) -> int:
    """Return the exit code for an attempt's outcome; for a signal 128 plus its number, as shells do."""
    if ended.late and not ended.told and ended.code == exit_codes.DONE:
        return exit_codes.STUCK
    return 128 - ended.code if ended.code < 0 else ended.code
