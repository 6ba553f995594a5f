"""Time limit (`--limit`) of a command, by which everything is saved and the process has exited."""

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fullstride.errors import Preempted
from fullstride.process.signals import leaving_on_sigterm
from fullstride.runs.atomic_files import note

# Seconds before the end that are left to save in, and the share of a short time that is.
RESERVE, SHARE = 20.0, 0.1


def _process_age() -> float:
    """Return seconds since the process was started, before Python's imports; 0 if the system does not say."""
    try:
        # Behind the name, which is in parentheses and may hold anything: proc(5)'s starttime, the 22nd field.
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0


@dataclass(frozen=True)
class Limit:
    """Deadline by the monotonic clock, with a reserve for saving."""

    seconds: float = math.inf  # the whole time, as it was asked for
    begun: float = 0.0  # its start

    @classmethod
    def of(cls, seconds: float) -> "Limit":
        """Return a limit that starts now."""
        return cls(seconds, time.monotonic())

    @classmethod
    def of_command(cls, seconds: float) -> "Limit":
        """Return a limit that began with the command's process, or now if another program calls."""
        is_command = Path(sys.argv[0]).parts[-2:] == ("benchmarks", "__main__.py")
        return cls(seconds, time.monotonic() - (_process_age() if is_command else 0.0))

    @property
    def until(self) -> float:
        """End of the limit."""
        return self.begun + self.seconds

    @property
    def spent(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.begun

    @property
    def reserve(self) -> float:
        """Seconds at the end that are reserved for saving."""
        return min(RESERVE, SHARE * self.seconds)

    @property
    def left(self) -> float:
        """Seconds left for work; negative once they are over."""
        return self.until - self.reserve - time.monotonic()

    def fits(self, seconds: float) -> bool:
        """Return whether work that is expected to take `seconds` may begin."""
        return seconds <= self.left

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Send this process a SIGTERM during the block once only the reserve is left.

        It covers work that takes longer than expected or cannot check the time, such as compiling or a solver.
        """
        # A timer takes no infinity.
        timer = threading.Timer(min(max(self.left, 0.0), threading.TIMEOUT_MAX), self._end)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()  # what it has begun to end is ended in here

    def _end(self) -> None:
        note(f"--limit {self.seconds:g}: {self.reserve:.0f} s are left for saving")
        os.kill(os.getpid(), signal.SIGTERM)

    def cuts(self, act: Callable[[], object]) -> Preempted | None:
        """Do something, `kept`, and return what ended it early if that was this limit: what comes next has its reserve;
        Preempted, SystemExit if it was somebody else, with something to save or without.
        """
        try:
            with leaving_on_sigterm(), self.kept():
                act()
        except (Preempted, SystemExit) as stopped:
            if self.left > 0:
                raise
            if isinstance(stopped, Preempted):
                return stopped
            return Preempted(f"--limit {self.seconds:g}: stopped; the same command goes on")
        return None
