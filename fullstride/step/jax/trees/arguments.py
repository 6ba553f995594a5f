"""Arguments and results of a cached function: modules from the cache, the rest leaf by leaf."""

from collections.abc import Iterator, Sequence
from sys import getrefcount
from typing import Any, NamedTuple

import equinox as eqx
import jax.tree_util as jtu
import numpy as np

from fullstride.step.jax.trees import memo
from fullstride.step.jax.trees.memo import ModuleLeaves
from fullstride.step.jax.trees.structure import Structure

# The mark of a leaf that is an array.
ARRAY = object()


class StaticTree(NamedTuple):
    """Static part of a tree: its structure down to the modules, and a mark for each leaf or module.

    A mark is `ARRAY`, a module's `Structure`, or the type and value of a static leaf: equal ones are one program.
    """

    treedef: Any
    marks: tuple[Any, ...]


class ReadTree(NamedTuple):
    """Tree that was taken apart.

    Attributes:
        groups: arrays, and tuples of arrays for modules.
        reading: the rest.
        modules: the modules with their records, and how many references each had while it was read.
        on_host: whether any array is NumPy's.

    """

    groups: tuple[Any, ...]
    reading: StaticTree
    modules: list[tuple[Any, ModuleLeaves, int]]
    on_host: bool


_MODULES: dict[type, bool] = {}


def _is_module(x: Any) -> bool:
    # Equinox's metaclass makes isinstance slow.
    kind = type(x)
    known = _MODULES.get(kind)
    if known is None:
        known = _MODULES[kind] = issubclass(kind, eqx.Module)
    return known


def read(tree: Any) -> ReadTree:
    """Take a tree apart, its modules by the cache."""
    leaves, treedef = jtu.tree_flatten(tree, is_leaf=_is_module)
    groups, marks, modules = [], [], []
    on_host = False
    for leaf in leaves:
        if _is_module(leaf):
            record = memo.read(leaf)
            groups.append(record.leaves)
            marks.append(record.structure)
            modules.append((leaf, record, getrefcount(leaf)))
            on_host |= record.on_host
        elif eqx.is_array(leaf):
            groups.append(leaf)
            marks.append(ARRAY)
            on_host |= isinstance(leaf, np.ndarray)
        else:
            marks.append((type(leaf), leaf))
    return ReadTree(tuple(groups), StaticTree(treedef, tuple(marks)), modules, on_host)


def rebuilt(reading: StaticTree, groups: Sequence[Any]) -> Any:
    """Rebuild the tree of a reading with these arrays, inside the trace."""
    return jtu.tree_unflatten(reading.treedef, list(_leaves(reading.marks, groups, Structure.build)))


def _leaves(marks: tuple[Any, ...], groups: Sequence[Any], build: Any) -> Iterator[Any]:
    arrays = iter(groups)
    for mark in marks:
        if mark is ARRAY:
            yield next(arrays)
        elif isinstance(mark, Structure):
            yield build(mark, next(arrays))
        else:
            yield mark[1]


@jtu.register_pytree_node_class
class Result:
    """Result of a cached function on its way through `jax.jit`: one node, so that nothing is rebuilt on the way."""

    __slots__ = ("groups", "reading")

    def __init__(self, groups: tuple[Any, ...], reading: StaticTree):
        self.groups, self.reading = groups, reading

    @classmethod
    def of(cls, out: Any) -> "Result":
        """Take the output of the function apart, inside of the trace."""
        given = read(out)
        return cls(given.groups, given.reading)

    def tree(self, spare: "SpareModules | None" = None) -> Any:
        """Return the output, its modules new or made of donated ones."""
        build = memo.made if spare is None else spare.made
        return jtu.tree_unflatten(self.reading.treedef, list(_leaves(self.reading.marks, self.groups, build)))

    def tree_flatten(self) -> tuple[tuple[Any, ...], StaticTree]:
        return self.groups, self.reading

    @classmethod
    def tree_unflatten(cls, reading: StaticTree, groups: tuple[Any, ...]) -> "Result":
        return cls(groups, reading)


class SpareModules:
    """Donated modules that nobody else holds: their nodes can carry the results.

    A function's caller holds a donated argument by one name, which it usually gives to the result. The arrays are gone
    after the call in any case; if someone else holds the module or a part of it, it is left as it is.
    """

    def __init__(self, given: ReadTree, args: Sequence[Any], holders: Sequence[int]):
        """Look at who holds what, before the call; `holders` are the references to each of `args` as `__call__` saw."""
        unheld = {id(arg) for arg, count in zip(args, holders, strict=True) if count <= HELD_BY_CALL}
        inside = len(unheld) == len(args)
        self.modules = [
            (module, record)
            for module, record, count in given.modules
            if record.shells is not None and (id(module) in unheld or (inside and count <= HELD_BY_TREE))
        ]

    def made(self, structure: Structure, leaves: tuple[Any, ...]) -> Any:
        """Make a module of these arrays."""
        for i, (module, record) in enumerate(self.modules):
            shells = record.shells
            if record.structure is structure and shells and _deleted(record.leaves) and shells.unshared():
                del self.modules[i]
                memo.refill(record, leaves)
                return module
        return memo.made(structure, leaves)


def _deleted(leaves: tuple[Any, ...]) -> bool:
    # A tree without arrays has nothing to reuse.
    kinds = set(map(type, leaves))
    if len(kinds) == 1:
        return all(map(kinds.pop().is_deleted, leaves))
    return bool(leaves) and all(x.is_deleted() for x in leaves)


class _Probe:
    """Counter of the references to an argument of a plain call, which differ between versions of Python."""

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return tuple(map(getrefcount, args))


def _held_by_call() -> int:
    argument = object()
    return _Probe()(argument)[0]


HELD_BY_CALL = _held_by_call()
HELD_BY_TREE = read((eqx.nn.Identity(),)).modules[0][2]
