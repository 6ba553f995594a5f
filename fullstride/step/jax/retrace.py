"""Traces are counted, and one after the first says which leaf or static value changed.

A trace depends on shapes and dtypes, static leaves and fields, and what functions close over.
"""

import dataclasses
import itertools
import re
import sys
import types
import warnings
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import jax.tree_util as jtu

from fullstride.errors import ConfigError, one_of
from fullstride.step.jax.loss import describe

# What lies between a trace and the call that caused it.
BETWEEN, PACKAGE = {"jax", "equinox", "contextlib"}, f"{__package__}."
# Earlier traces that a new one is compared with, at most.
KEPT = 16
POLICIES = ("warn", "raise", "ignore")
# Longer values are shown from shortly before they differ.
LONG, BEFORE = 80, 12
ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class RetraceWarning(UserWarning):
    """Repeated trace and compilation of a step; the message names the leaves that changed."""


class RetraceWatch:
    """Watcher of the traces of a function, which happen only if something changed.

    Attributes:
        count: traces so far.

    """

    def __init__(self, policy: str):
        one_of("on_retrace", policy, POLICIES)
        self.policy, self.count = policy, 0
        self._seen: deque[dict[str, str]] = deque(maxlen=KEPT)

    @contextmanager
    def tracing(self, **trees: Any) -> Iterator[None]:
        """Enclose a trace with these arguments, which counts when it succeeds.

        Raises:
            ConfigError: for a second trace, if the policy is `raise`; nothing was compiled or donated yet.

        """
        if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
            # Nothing is traced: each call runs the function itself.
            yield
            return
        now = signature(trees)
        if self._seen and self.policy != "ignore":
            # The call before need not have been traced: of those that were, the one most like this.
            before = min(reversed(self._seen), key=lambda seen: len(changed(seen, now)))
            message = f"the step is traced again (trace {self.count + 1}): {difference(before, now)}"
            if self.policy == "raise":
                raise ConfigError(f"{message}; keep shapes and dtypes the same, or set on_retrace='warn'")
            warnings.warn(message, RetraceWarning, stacklevel=_callers_level(sys._getframe()))
        yield
        self.count += 1
        self._seen.append(now)


def _callers_level(frame: types.FrameType) -> int:
    """The `stacklevel` in a frame of the first one above it that called a step."""
    level = 1
    while frame.f_back is not None:
        module = frame.f_globals.get("__name__", "")
        if not (module.partition(".")[0] in BETWEEN or f"{module}.".startswith(PACKAGE)):
            break
        frame, level = frame.f_back, level + 1
    return level


def signature(trees: dict[str, Any]) -> dict[str, str]:
    """Describe what a trace depends on, part by part."""
    return {name: text for key, tree in trees.items() for name, text in described(key, tree)}


def listed(most: int = 8, **trees: Any) -> str:
    """The arguments in words."""
    words = [f"{name} {kind}" for name, kind in signature(trees).items()]
    return (", ".join(words[:most]) or "no array") + (f" and {len(words) - most} more" if len(words) > most else "")


def described(name: str, value: Any, around: tuple[Any, ...] = ()) -> Iterator[tuple[str, str]]:
    """Name and text of each part of a value: of arrays shape and dtype, of anything else what it is.

    Args:
        name: the value's own.
        value: a tree; static fields of its modules are looked into, too, and so are the closures of functions.
        around: what the value lies in, as a function may close over itself.

    """
    if value is None or any(value is x for x in around):
        return
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        yield name, str(jax.typeof(value)) if isinstance(value, jax.Array) else describe(value)
        return
    children = dict(_children(value))
    container = isinstance(value, list | tuple | Mapping) or _is_instance_of_dataclass(value)
    if isinstance(value, types.FunctionType) or not (children or container):
        yield name, _text(value)
    for key, child in children.items():
        yield from described(name + key, child, (*around, value))


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    if _is_instance_of_dataclass(value):
        names = (field.name for field in dataclasses.fields(value))
        yield from ((f".{name}", getattr(value, name)) for name in names if hasattr(value, name))
    elif isinstance(value, types.FunctionType):
        yield from ((f".{name}", cell) for name, cell in _closure(value))
    elif isinstance(value, Mapping):
        yield from ((f"[{key!r}]", child) for key, child in value.items())
    elif isinstance(value, tuple) and (names := getattr(value, "_fields", None)):
        yield from ((f".{name}", child) for name, child in zip(names, value, strict=True))
    elif isinstance(value, list | tuple):
        yield from ((f"[{i}]", child) for i, child in enumerate(value))
    elif (found := jtu.default_registry.flatten_one_level_with_keys(value)) is not None:
        yield from ((jtu.keystr((key,)), child) for key, child in found[0])
        yield ".structure", repr(found[1])


def _closure(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:
            # It was never assigned.
            continue


def _is_instance_of_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _text(value: Any) -> str:
    try:
        return repr(value)
    except Exception:
        return object.__repr__(value)


def changed(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """The names of parts that differ."""
    return [name for name in (*now, *(before.keys() - now.keys())) if before.get(name) != now.get(name)]


def difference(before: dict[str, str], now: dict[str, str], most: int = 3) -> str:
    """Describe the parts that differ; objects that differ only by address are named if nothing else differs."""
    names = changed(before, now)
    told = [name for name in names if _plain(before.get(name)) != _plain(now.get(name))] or names
    if not told:
        return (
            "no shape, dtype or static value changed; something outside of the arguments did, such as a context or a "
            "setting, or an object whose text does not show it"
        )
    words = [f"{name} was {old}, now {new}" for name in told[:most] for old, new in [_shown(before, now, name)]]
    return "; ".join(words) + (f"; and {len(told) - most} more" if len(told) > most else "")


def _plain(text: str | None) -> str | None:
    return text and ADDRESS.sub("", text)


def _shown(before: dict[str, str], now: dict[str, str], name: str) -> list[str]:
    both = [tree.get(name, "absent") for tree in (before, now)]
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*both, strict=False)))
    start = max(0, same - BEFORE) if max(map(len, both)) > LONG else 0
    return [("..." if start else "") + x[start:][:LONG] + ("..." if len(x) - start > LONG else "") for x in both]
