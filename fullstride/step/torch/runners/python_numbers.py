"""Python numbers that a loss reads: constants of a step that is compiled or recorded, whoever changes them."""

import functools
from collections.abc import Callable, Iterable
from numbers import Number
from typing import Any

from torch import nn

from fullstride.step.torch.runners.reached_state import Reached

# A longer list is data.
SHORT = 16


class Constants:
    """Numbers that a program's functions name, in closures, globals, attributes and dicts, and modules' `training`."""

    def __init__(self, roots: Iterable[Any]):
        """Look for them from these objects on; those that are made later are not seen."""
        reached = Reached(roots)
        found = [(v.name, v.read) for v in reached.variables if isinstance(v.value, Number)]
        for x in reached.objects.values():
            if isinstance(x, (dict, list)):
                found += _items(x, reached.names)
            elif not isinstance(x, type):
                found += _attributes(x, reached.names)
        self._read: list[Callable[[], Any]] = [read for _, read in found]
        modules = [x for x in reached.objects.values() if isinstance(x, nn.Module)]
        self._modules = [vars(module) for module in modules]
        self.names = [*(name for name, _ in found), *(f"{type(module).__name__}.training" for module in modules)]

    def now(self) -> list[Any]:
        """Their present values."""
        return [*[read() for read in self._read], *[own["training"] for own in self._modules]]


def _attributes(x: Any, names: set[str]) -> list[tuple[str, Callable[[], Any]]]:
    own = getattr(x, "__dict__", {})
    known = sorted(name for name in names & own.keys() if isinstance(own[name], Number))
    return [(f"{type(x).__name__}.{name}", functools.partial(own.get, name)) for name in known]


def _items(x: dict[Any, Any] | list[Any], names: set[str]) -> list[tuple[str, Callable[[], Any]]]:
    if isinstance(x, dict):
        named = [key for key, value in x.items() if isinstance(value, Number) and key in names]
        return [(repr(key), functools.partial(x.get, key)) for key in named]
    given = [i for i, value in enumerate(x) if isinstance(value, Number)] if len(x) <= SHORT else []
    return [(f"item {i} of a list", functools.partial(_item, x, i)) for i in given]


def _item(x: list[Any], number: int) -> Any:
    return x[number] if number < len(x) else None
