"""Errors that the command line shows as a single line, and the search for the nearest name."""

import difflib
import sys
from collections.abc import Iterable
from typing import Any

# Above it one name is taken for a misspelling of another: unett of unet, but not gpu of cpu.
ALIKE = 0.7
# Characters of a value that an error shows.
MOST_SHOWN = 160
# What runtimes say that have no class of their own for it: PyTorch's CPU allocator, and XLA.
NO_MEMORY = ("can't allocate memory", "not enough memory", "RESOURCE_EXHAUSTED")


class ConfigError(ValueError):
    """Invalid setting; the message is one line: what was received, what was expected, what to do."""


class Damaged(ConfigError):  # noqa: N818, it is a state of a file
    """Record that exists but cannot be decoded."""


class OutOfMemory(RuntimeError):  # noqa: N818, as PyTorch and MPI call it
    """Step that did not fit in memory; the message gives its size and what would fit."""


class ReadError(OSError):
    """Data that could not be read, though another attempt may succeed: storage is away, or a worker has died."""


class Preempted(Exception):  # noqa: N818, it is no error
    """Request to end (SIGTERM), after the run has saved; the command line exits with 0."""


class PeerError(RuntimeError):
    """Failure of another of the processes that train together; the message gives what is known of it."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory ran out: Python's, PyTorch's or XLA's, on a GPU or a CPU."""
    if isinstance(error, MemoryError):
        return True
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in NO_MEMORY)


def one_line(error: BaseException) -> str:
    """Return an error's message on one line; its class name if it has none."""
    return " ".join(str(error).split()) or type(error).__name__


def shortened(text: str, most: int) -> str:
    """Return untrusted text as one printable line of at most `most` characters, cut in the middle."""
    plain = "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
    return plain if len(plain) <= most else f"{plain[: most // 2 - 2]}...{plain[-(most // 2 - 1) :]}"


def similarity(a: str, b: str) -> float:
    """Return how alike two names are, from 0 to 1 (Ratcliff and Obershelp's measure)."""
    return difflib.SequenceMatcher(None, a, b, autojunk=False).ratio()


def one_of(key: str, value: Any, names: Iterable[str]) -> None:
    """Check that a setting is one of `names`.

    Raises:
        ConfigError: if it is not; the message lists the names, nearest first.

    """
    if value in (names := tuple(names)):
        return
    given = shortened(str(value), MOST_SHOWN)
    ordered = sorted(names, key=lambda name: -similarity(name, given))
    hint = f"; did you mean {ordered[0]}?" if similarity(ordered[0], given) >= ALIKE else ""
    raise ConfigError(f"{key}={given}: expected {'one of ' * (len(names) > 1)}{', '.join(ordered)}{hint}")
