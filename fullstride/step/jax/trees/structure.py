"""Structure of a tree: its arrays in tuples, and all the rest in one token that hashes by identity."""

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import equinox as eqx
import jax.tree_util as jtu
import numpy as np

from fullstride.errors import ConfigError

# The slot of a leaf that is no array.
STATIC = -1


@dataclasses.dataclass(eq=False, slots=True, weakref_slot=True)
class Structure:
    """Structure of a tree without its arrays; equal trees have the same one, so that `is` compares them.

    Attributes:
        treedef: JAX's structure of the tree.
        slots: for each leaf the number of the group that holds it, or `STATIC`.
        statics: for each leaf its value if it is static, else None.

    """

    treedef: Any
    slots: tuple[int, ...]
    statics: tuple[Any, ...]

    def build(self, *groups: Iterable[Any]) -> Any:
        """Build the tree with these leaves, one iterable for each group, in the tree's order."""
        sources = [iter(group) for group in groups]
        leaves = [
            static if slot == STATIC else next(sources[slot])
            for slot, static in zip(self.slots, self.statics, strict=True)
        ]
        return jtu.tree_unflatten(self.treedef, leaves)

    def paths(self, group: int = 0) -> tuple[Any, ...]:
        """Return JAX's paths of a group's leaves."""
        tree = jtu.tree_unflatten(self.treedef, [Place(slot) for slot in self.slots])
        return tuple(path for path, place in jtu.tree_leaves_with_path(tree) if place.number == group)

    def names(self, group: int = 0) -> tuple[str, ...]:
        """Return the paths as text, such as `.layers[0].weight`."""
        return tuple(map(jtu.keystr, self.paths(group)))


@dataclasses.dataclass(eq=False, slots=True)
class Place:
    """Placeholder of a leaf; unlike an integer, no module's converter or check takes it for a value."""

    number: int


_INTERNED: "weakref.WeakValueDictionary[Any, Structure]" = weakref.WeakValueDictionary()


def _numbers(treedef: Any) -> Iterator[type]:
    """Yield the types of all numbers in static fields, in the tree's order."""
    if (data := treedef.node_data()) is not None:
        yield from _types(data[1])
        for child in treedef.children():
            yield from _numbers(child)


def _types(field: Any) -> Iterator[type]:
    if isinstance(field, tuple | list):
        for x in field:
            yield from _types(x)
    elif dataclasses.is_dataclass(field) and not isinstance(field, type):
        yield from _types([getattr(field, f.name) for f in dataclasses.fields(field) if hasattr(field, f.name)])
    elif isinstance(field, int | float | complex | np.generic):
        yield type(field)


def _unhashable(treedef: Any, statics: tuple[Any, ...]) -> ConfigError:
    filled = jtu.tree_unflatten(treedef, [(s,) for s in statics])
    pairs = jtu.tree_leaves_with_path(filled, is_leaf=lambda x: isinstance(x, tuple) and len(x) == 1)
    for path, (static,) in pairs:
        try:
            hash(static)
        except TypeError:
            return ConfigError(
                f"the leaf {jtu.keystr(path) or 'itself'} is a {type(static).__name__}, which is neither an array nor "
                "hashable; make it an array or a static field"
            )
    return ConfigError("a static field of the tree cannot be hashed; make it a tuple, or an array that is no static")


def split(tree: Any, *wanted: Callable[[Any], bool]) -> tuple[Structure, tuple[tuple[Any, ...], ...]]:
    """Take a tree apart: each leaf goes to the first group whose filter wants it, the rest is static.

    Returns:
        The interned structure and the groups' leaves.

    """
    leaves, treedef = jtu.tree_flatten(tree)
    wanted = wanted or (eqx.is_array,)
    slots = tuple(next((i for i, wants in enumerate(wanted) if wants(leaf)), STATIC) for leaf in leaves)
    return assemble(treedef, leaves, slots, len(wanted))


def assemble(
    treedef: Any, leaves: Sequence[Any], slots: tuple[int, ...], groups: int
) -> tuple[Structure, tuple[tuple[Any, ...], ...]]:
    """Return the interned structure of these parts, and the groups of leaves whose slots are known."""
    statics = tuple(leaf if slot == STATIC else None for leaf, slot in zip(leaves, slots, strict=True))
    taken = tuple(
        tuple(leaf for leaf, slot in zip(leaves, slots, strict=True) if slot == group) for group in range(groups)
    )
    # 1, 1.0 and True are equal, but a trace made for one is wrong for another.
    key = (treedef, slots, statics, tuple(map(type, statics)), tuple(_numbers(treedef)))
    try:
        found = _INTERNED.get(key)
    except TypeError:
        raise _unhashable(treedef, statics) from None
    if found is None:
        found = _INTERNED[key] = Structure(treedef, slots, statics)
    return found, taken
