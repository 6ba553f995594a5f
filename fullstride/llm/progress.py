"""Lines at the start of an engine: loading weights, compiling, ready."""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from fullstride.assets.fetch import cache_folder
from fullstride.runs.atomic_files import note

# To be called with how many of how many are done.
OnProgress = Callable[[int, int], None]
# Of programs: with how many the program cache had at the start, too; None if JAX's own cache serves.
OnPrograms = Callable[[int, int, int | None], None]
Say = Callable[[str], None]
# Between two lines that differ in how many programs are ready.
SECONDS = 15.0


def programs_folder() -> Path:
    """Return the folder of engines' executables in the cache."""
    return cache_folder() / "programs"


class StartProgress:
    """Reporter of an engine's start: the first programs at once, the others now and then."""

    def __init__(self, name: str, say: Say):
        """Report that the weights are loading."""
        self._name = name
        self._say = say
        self._compiling = False
        self._started = self._last = time.monotonic()
        say(f"{name}: loading weights")

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started

    def weights(self, done: int, total: int) -> None:
        """Report how many layers are on the devices."""
        self._now_and_then(f"{done} of {total} layers are loaded")

    def programs(self, done: int, total: int, cached: int | None = None) -> None:
        """Report how many programs are ready; 0 at first."""
        if not self._compiling:
            self._compiling, self._last = True, time.monotonic()
            self._say(f"{self._name}: {_plan(total, cached)}")
        else:
            self._now_and_then(f"{done} of {total} programs are ready")

    def _now_and_then(self, what: str) -> None:
        if time.monotonic() - self._last >= SECONDS:
            self._last = time.monotonic()
            self._say(f"{self._name}: {what} after {self.seconds:.0f} s")


@contextlib.contextmanager
def starting(name: str, say: Say = note) -> Iterator[StartProgress]:
    """Report an engine's start in lines: loading weights, compiling, ready.

    Args:
        name: name of the model, at the beginning of each line.
        say: function that prints a line, such as a logger's `info`.

    Yields:
        What takes the progress of an `Engine`, which is made meanwhile.

    """
    start = StartProgress(name, say)
    yield start
    say(f"{name}: ready after {start.seconds:.1f} s")


def _plan(total: int, cached: int | None) -> str:
    """Return how many programs are compiled, and where those of an earlier start come from, if they are cached."""
    if cached:
        return f"reading {cached} programs from {programs_folder()}, compiling {total - cached}"
    import jax

    folder = jax.config.values["jax_compilation_cache_dir"] if cached is None else None
    more = f"; those that an earlier start compiled come from {folder}" if folder else ""
    return f"compiling {total} programs{more}"
