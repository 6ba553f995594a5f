"""Lines at the start of an engine: loading weights, compiling, ready."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

# To be called with how many of how many are done.
OnProgress = Callable[[int, int], None]
Say = Callable[[str], None]
# Between two lines that differ in how many programs are ready.
SECONDS = 15.0


def to_stderr(line: str) -> None:
    """Print a line that is not part of the result."""
    sys.stderr.write(f"{line}\n")


def silently(line: str) -> None:
    """Print nothing."""


@contextlib.contextmanager
def starting(name: str, say: Say = to_stderr) -> Iterator[OnProgress]:
    """Say what the start of an engine is doing, in lines: loading weights, compiling, ready.

    Args:
        name: of the model, with which each line begins.
        say: takes the lines, such as a logger's `info`.

    Yields:
        The `progress` of an `Engine`, which is made meanwhile.

    """
    started = last = time.monotonic()

    def progress(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if done == 0 and last == started:  # the first call
            say(f"{name}: compiling {total} programs{_cached()}")
        elif now - last >= SECONDS:
            say(f"{name}: {done} of {total} programs are ready after {now - started:.0f} s")
        else:
            return
        last = now

    say(f"{name}: loading weights")
    yield progress
    say(f"{name}: ready after {time.monotonic() - started:.1f} s")


def _cached() -> str:
    """Where programs of an earlier start come from, if they are kept."""
    import jax

    folder = jax.config.values["jax_compilation_cache_dir"]
    return f"; those that an earlier start compiled come from {folder}" if folder else ""
