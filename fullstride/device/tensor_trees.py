"""Trees of tensors: what PyTorch's pytree opens, and also dataclasses and `UserDict`s, such as tokenizers return."""

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable
from typing import Any

from torch.utils import _pytree as pytree


def _parts(x: Any) -> dict[Any, Any] | None:
    """What a container holds by name, of those that pytree takes for a leaf; None for a leaf."""
    if isinstance(x, UserDict):
        return x.data
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        return {field.name: getattr(x, field.name) for field in dataclasses.fields(x) if hasattr(x, field.name)}
    return None


def flattened(tree: Any) -> tuple[list[Any], list[Any]]:
    """The leaves of a tree, and its structure, which can be compared."""
    leaves, structure = [], []
    given, spec = pytree.tree_flatten(tree)
    structure.append(spec)
    for leaf in given:
        if (parts := _parts(leaf)) is None:
            leaves.append(leaf)
            continue
        more, inner = flattened(list(parts.values()))
        leaves += more
        structure += [len(leaves), type(leaf), list(parts), inner]
    return leaves, structure


def mapped(change: Callable[[Any], Any], tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """A tree of the same structure with each leaf changed."""

    def each(leaf: Any) -> Any:
        if (parts := _parts(leaf)) is None or (is_leaf is not None and is_leaf(leaf)):
            return change(leaf)
        made = copy.copy(leaf)
        for name, part in parts.items():
            if isinstance(made, UserDict):
                made.data[name] = mapped(change, part, is_leaf)
            else:
                object.__setattr__(made, name, mapped(change, part, is_leaf))
        return made

    return pytree.tree_map(each, tree, is_leaf=is_leaf)
