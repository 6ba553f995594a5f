"""Traces are counted, and one after the first says which leaf changed."""

import sys
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax

from fullstride.errors import ConfigError, one_of

# What lies between a trace and the call that caused it.
BETWEEN, PACKAGE = {"jax", "equinox", "contextlib"}, f"{__package__}."
POLICIES = ("warn", "raise", "ignore")


class RetraceWarning(UserWarning):
    """A step was traced and compiled again: its message names the leaves that changed."""


class Retraces:
    """Told of each trace of a function, which happens only when something changed.

    Attributes:
        count: traces so far.

    """

    def __init__(self, policy: str):
        """Start at no trace.

        Raises:
            ConfigError: for an unknown policy.

        """
        one_of("on_retrace", policy, POLICIES)
        self.policy, self.count = policy, 0
        self.last: dict[str, str] = {}

    @contextmanager
    def tracing(self, **trees: Any) -> Iterator[None]:
        """Around a trace with these arguments, which counts when it succeeds.

        Raises:
            ConfigError: for a second one, where the policy is `raise`; nothing was compiled or donated yet.

        """
        now = signature(trees)
        if self.count and self.policy != "ignore":
            self._tell(f"the step is traced again (trace {self.count + 1}): {difference(self.last, now)}")
        yield
        self.count, self.last = self.count + 1, now

    def _tell(self, message: str) -> None:
        if self.policy == "raise":
            raise ConfigError(f"{message}; keep shapes and dtypes the same, or set on_retrace='warn'")
        warnings.warn(message, RetraceWarning, stacklevel=_callers_level(sys._getframe()))


def _callers_level(frame: types.FrameType) -> int:
    """The `stacklevel` in a frame of the first one above it that called a step."""
    level = 1
    while frame.f_back is not None and _is_between(frame.f_globals.get("__name__", "")):
        frame, level = frame.f_back, level + 1
    return level


def _is_between(module: str) -> bool:
    return module.partition(".")[0] in BETWEEN or f"{module}.".startswith(PACKAGE)


def signature(trees: dict[str, Any]) -> dict[str, str]:
    """What a trace depends on, for each leaf by its name."""
    return {
        name + jax.tree_util.keystr(path): str(jax.typeof(leaf))
        for name, tree in trees.items()
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def listed(most: int = 8, **trees: Any) -> str:
    """The arguments in words."""
    words = [f"{name} {kind}" for name, kind in signature(trees).items()]
    return (", ".join(words[:most]) or "no array") + (f" and {len(words) - most} more" if len(words) > most else "")


def difference(before: dict[str, str], now: dict[str, str], most: int = 3) -> str:
    """The leaves that differ, in words."""
    words = [
        f"{name} was {before.get(name, 'absent')}, now {now.get(name, 'absent')}"
        for name in (*now, *(before.keys() - now.keys()))
        if before.get(name) != now.get(name)
    ]
    if not words:
        return "no shape or dtype changed; something outside of the arguments did, such as a context or a setting"
    return "; ".join(words[:most]) + (f"; and {len(words) - most} more" if len(words) > most else "")
