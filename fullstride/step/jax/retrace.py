"""Traces are counted, and one after the first says which leaf or static value changed."""

import sys
import types
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax

from fullstride.errors import ConfigError, one_of
from fullstride.step.jax.description import changed, described, difference

# What lies between a trace and the call that caused it.
BETWEEN, PACKAGE = {"jax", "equinox", "contextlib"}, f"{__package__}."
# Earlier traces that a new one is compared with, at most.
KEPT = 16
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
        self._seen: deque[dict[str, str]] = deque(maxlen=KEPT)

    @contextmanager
    def tracing(self, **trees: Any) -> Iterator[None]:
        """Around a trace with these arguments, which counts when it succeeds.

        Raises:
            ConfigError: for a second one, where the policy is `raise`; nothing was compiled or donated yet.

        """
        if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
            # Nothing is traced: each call runs the function itself.
            yield
            return
        now = signature(trees)
        if self._seen and self.policy != "ignore":
            # The call before need not have been traced: of those that were, the one most like this.
            before = min(reversed(self._seen), key=lambda seen: len(changed(seen, now)))
            self._tell(f"the step is traced again (trace {self.count + 1}): {difference(before, now)}")
        yield
        self.count += 1
        self._seen.append(now)

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
    """Describe what a trace depends on, part by part."""
    return {name: text for key, tree in trees.items() for name, text in described(key, tree)}


def listed(most: int = 8, **trees: Any) -> str:
    """The arguments in words."""
    words = [f"{name} {kind}" for name, kind in signature(trees).items()]
    return (", ".join(words[:most]) or "no array") + (f" and {len(words) - most} more" if len(words) > most else "")
