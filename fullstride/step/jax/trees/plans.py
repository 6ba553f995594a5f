"""Plans that build trees of modules quickly from flat leaves, and refill them."""

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from itertools import repeat
from operator import setitem
from sys import getrefcount
from typing import Any, NamedTuple

import equinox as eqx
import jax.tree_util as jtu

from fullstride.step.jax.trees.structure import STATIC, Place, Structure

# Insides of dead trees of one structure that are kept at most: a step may return several, such as Adam's moments.
POOL = 4
# Makes a value from the leaves and the nodes.
Maker = Callable[[Sequence[Any], Sequence[Any]], Any]


# Module's own __getattribute__ is written in Python.
get = object.__getattribute__


class ModuleNodes:
    """The insides of one tree, which arrays go into; its root is not among them, so that the root can die.

    Attributes:
        below: the nodes below the root, children before parents.
        containers: for each node, the root last, the dict or list that its children lie in; None for a tuple.
        lists: the lists and dicts among them, which anyone may change.
        slots: for each leaf that does not lie in a tuple its container.
        tuples: container and key of each tuple that is made anew at each filling.
        sealed: `counts` when nobody but this tree and what is remembered of it held the nodes; None before. Those of a
            dead tree are held by as many again.

    """

    __slots__ = ("_sized", "below", "containers", "lists", "sealed", "slots", "tuples")

    def __init__(self, nodes: list[Any]):
        """Take the nodes, the root last."""
        self.below, self.containers = nodes[:-1], [container(node) for node in nodes]
        self.lists = [node for node in self.below if type(node) in (list, dict)]
        self.slots: list[Any] = []
        self.tuples: list[tuple[Any, Any]] = []
        self._sized = [c for c in self.containers if c is not None]
        self.sealed: tuple[int, int] | None = None

    def unshared(self) -> bool:
        """Return whether nobody else holds a node below the root, and nobody put anything into one."""
        return self.counts() == self.sealed

    def counts(self) -> tuple[int, int]:
        """Count references to the nodes (raised by a holder) and entries in them (raised by a cached value).

        A list or dict that was changed takes references away; callers look at those themselves.
        """
        # The root's own dict, too: `vars` gives it away.
        holders = sum(map(getrefcount, self.below)) + getrefcount(self.containers[-1])
        for place, key in self.tuples:
            holders += _holders(place[key])
        return holders, sum(map(len, self._sized))


def _holders(value: Any) -> int:
    """How often a tuple, and each one in it, is referred to; empty ones are the same everywhere."""
    if not isinstance(value, tuple) or not value:
        return 0
    return getrefcount(value) + sum(map(_holders, value))


def container(node: Any) -> Any:
    """Return the container of a node's children: a module's dict, a list or dict itself, None for a tuple."""
    if isinstance(node, eqx.Module):
        return get(node, "__dict__")
    return None if isinstance(node, tuple) else node


class UnplannableError(TypeError):
    """Tree with nodes that are neither modules, tuples, lists nor dicts; it is read and built anew each time."""


class _Part(NamedTuple):
    """Part of the tree at one place: a constant, a leaf, a node, or a tuple to be made at each filling."""

    kind: str
    value: Any


class RebuildPlan:
    """Plan for building trees of one structure: a module's, with its arrays in the only group.

    Raises:
        UnplannableError: for another kind of tree.

    """

    def __init__(self, structure: Structure):
        self.makers: list[Callable[[Sequence[Any]], Any]] = []
        self.links: list[tuple[int, Any, int]] = []
        self.values: list[tuple[int, Any, Maker]] = []
        self.places: dict[int, tuple[int, Any]] = {}
        marked, leaves = [], 0
        for slot, static in zip(structure.slots, structure.statics, strict=True):
            marked.append(static if slot == STATIC else Place(leaves))
            leaves += slot != STATIC
        tree = jtu.tree_unflatten(structure.treedef, marked)
        if self._visit(tree).kind != "node" or not isinstance(tree, eqx.Module):
            raise UnplannableError(f"a {type(tree).__name__} with {leaves} arrays")
        self.root, self.pool = type(tree), list[ModuleNodes]()
        self.direct = None if len(self.places) == leaves else sorted(self.places)
        self.keys = [self.places[i][1] for i in sorted(self.places)]

    def make(self, leaves: Sequence[Any]) -> tuple[Any, ModuleNodes]:
        """Return a tree that nobody else holds, and its insides: those of one that died, or new ones."""
        if self.pool:
            shells = self.pool.pop()
            root = object.__new__(self.root)
            object.__setattr__(root, "__dict__", shells.containers[-1])
            self.fill(shells, leaves)
            return root, shells
        nodes: list[Any] = []
        for maker in self.makers:
            nodes.append(maker(nodes))
        shells = ModuleNodes(nodes)
        for parent, key, child in self.links:
            shells.containers[parent][key] = nodes[child]
        shells.slots = [shells.containers[self.places[i][0]] for i in sorted(self.places)]
        shells.tuples = [(shells.containers[parent], key) for parent, key, _ in self.values]
        self.fill(shells, leaves)
        return nodes[-1], shells

    def fill(self, shells: ModuleNodes, leaves: Sequence[Any]) -> None:
        """Put other leaves into a tree."""
        direct = leaves if self.direct is None else [leaves[i] for i in self.direct]
        deque(map(setitem, shells.slots, self.keys, direct), maxlen=0)
        for parent, key, maker in self.values:
            shells.containers[parent][key] = maker(leaves, shells.below)

    def keep(self, shells: ModuleNodes) -> None:
        """Keep the insides of a tree whose root died for another one, without its arrays."""
        if len(self.pool) < POOL:
            deque(map(setitem, shells.slots, self.keys, repeat(None)), maxlen=0)
            for parent, key, _ in self.values:
                shells.containers[parent][key] = None
            self.pool.append(shells)

    def _visit(self, x: Any) -> _Part:
        if isinstance(x, Place):
            return _Part("leaf", x.number)
        if isinstance(x, eqx.Module):
            static = {f.name for f in dataclasses.fields(x) if f.metadata.get("static", False)}
            return self._module(x, {k: v for k, v in get(x, "__dict__").items() if k not in static})
        if type(x) is list:
            return self._node(x.copy, dict(enumerate(x)))
        if type(x) is dict:
            return self._node(x.copy, x)
        if type(x) is tuple or (isinstance(x, tuple) and hasattr(x, "_fields")):
            return self._tuple(type(x), [self._visit(child) for child in x], x)
        if _is_foreign(x):
            raise UnplannableError(f"what a {type(x).__name__} holds may change unseen")
        return _Part("constant", x)

    def _module(self, x: Any, children: dict[str, Any]) -> _Part:
        if not _mutable(x):
            return _Part("constant", x)
        kind, template = type(x), dict(get(x, "__dict__"))

        def maker() -> Any:
            made = object.__new__(kind)
            get(made, "__dict__").update(template)
            return made

        return self._node(maker, children)

    def _node(self, maker: Callable[[], Any], children: dict[Any, Any]) -> _Part:
        parts = {key: self._visit(child) for key, child in children.items()}
        self.makers.append(lambda nodes: maker())
        number = len(self.makers) - 1
        for key, part in parts.items():
            if part.kind == "leaf":
                self.places[part.value] = number, key
            elif part.kind == "node":
                self.links.append((number, key, part.value))
            elif part.kind == "value":
                self.values.append((number, key, part.value))
        return _Part("node", number)

    def _tuple(self, kind: Any, parts: list[_Part], x: Any) -> _Part:
        kinds = {part.kind for part in parts}
        if kinds <= {"constant"}:
            return _Part("constant", x)
        makers = [_maker(part) for part in parts]

        def maker(leaves: Sequence[Any], nodes: Sequence[Any]) -> Any:
            children = [make(leaves, nodes) for make in makers]
            return kind(children) if kind is tuple else kind(*children)

        if kinds & {"leaf", "value"}:
            return _Part("value", maker)
        self.makers.append(lambda nodes: maker((), nodes))
        return _Part("node", len(self.makers) - 1)


def _maker(part: _Part) -> Maker:
    value = part.value
    if part.kind == "leaf":
        return lambda leaves, nodes: leaves[value]
    if part.kind == "node":
        return lambda leaves, nodes: nodes[value]
    return value if part.kind == "value" else lambda leaves, nodes: value


def _is_foreign(x: Any) -> bool:
    """Return whether `x` is a pytree node to JAX but neither a module nor a plain tuple, list or dict."""
    return x is not None and not jtu.all_leaves([x])


def _mutable(x: Any) -> bool:
    """Return whether a tree has anything that copies cannot share: arrays, lists, dicts, or foreign pytree nodes."""
    if isinstance(x, Place) or type(x) in (list, dict):
        return True
    if not isinstance(x, eqx.Module | tuple) and _is_foreign(x):
        return True
    children = get(x, "__dict__").values() if isinstance(x, eqx.Module) else x if isinstance(x, tuple) else ()
    return any(_mutable(child) for child in children)
