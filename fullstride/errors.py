"""The one error that the command line shows as a single line with exit code 2, and how it finds the nearest name."""

import difflib
from collections.abc import Iterable
from typing import Any

# Above it one name is taken for a misspelling of another: unett of unet, but not gpu of cpu.
ALIKE = 0.7


class ConfigError(ValueError):
    """A setting that cannot be: its message is one line with what was received, what was expected, what to do."""


def similarity(a: str, b: str) -> float:
    """How alike two names are, from 0 to 1 (Ratcliff and Obershelp's measure)."""
    return difflib.SequenceMatcher(None, a, b, autojunk=False).ratio()


def one_of(key: str, value: Any, names: Iterable[str]) -> None:
    """Check that a setting is one of `names`.

    Raises:
        ConfigError: if it is not; the message lists the names, nearest first.

    """
    if value in (names := tuple(names)):
        return
    ordered = sorted(names, key=lambda name: -similarity(name, str(value)))
    hint = f"; did you mean {ordered[0]}?" if similarity(ordered[0], str(value)) >= ALIKE else ""
    raise ConfigError(f"{key}={value}: expected {'one of ' * (len(names) > 1)}{', '.join(ordered)}{hint}")
