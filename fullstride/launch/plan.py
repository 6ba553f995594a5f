"""What a launch would do, to be shown or done."""

import shlex
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """A launch before it happens.

    Attributes:
        text: exactly what would be submitted.
        submit: does it; returns the exit code.

    """

    text: str
    submit: Callable[[], int]


def shown_line(line: list[str]) -> str:
    """A command line as a shell takes it."""
    return shlex.join(line)
