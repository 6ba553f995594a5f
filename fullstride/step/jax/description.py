"""The parts that a trace depends on: shapes and dtypes, static leaves and fields, what functions close over."""

import dataclasses
import itertools
import re
import types
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.tree_util as jtu

from fullstride.step.jax.loss import describe

# Longer values are shown from shortly before they differ.
LONG, BEFORE = 80, 12
ADDRESS = re.compile(r" at 0x[0-9a-f]+")


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
    if isinstance(value, types.FunctionType) or not (children or _is_container(value)):
        yield name, _text(value)
    for key, child in children.items():
        yield from described(name + key, child, (*around, value))


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
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


def _is_container(value: Any) -> bool:
    return isinstance(value, list | tuple | Mapping) or (
        dataclasses.is_dataclass(value) and not isinstance(value, type)
    )


def _text(value: Any) -> str:
    try:
        return repr(value)
    except Exception:
        return object.__repr__(value)


def changed(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """The names of parts that differ."""
    return [name for name in (*now, *(before.keys() - now.keys())) if before.get(name) != now.get(name)]


def difference(before: dict[str, str], now: dict[str, str], most: int = 3) -> str:
    """The parts that differ, in words; objects that differ by their address alone where nothing else does."""
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
