"""The insides of a tree of modules, which arrays go into, and whether somebody else holds any of them."""

from sys import getrefcount
from typing import Any

import equinox as eqx

# Module's own __getattribute__ is written in Python.
get = object.__getattribute__


class Shells:
    """The insides of one tree, which arrays go into; its root is not among them, so that the root can die.

    Attributes:
        below: the nodes below the root, children before parents.
        containers: for each node, the root last, the dict or list that its children lie in; None for a tuple.
        lists: the lists and dicts among them, which anyone may change.
        slots: for each leaf that does not lie in a tuple its container.
        tuples: container and key of each tuple that is made anew at each filling.

    """

    __slots__ = ("_sealed", "_sized", "below", "containers", "lists", "slots", "tuples")

    def __init__(self, nodes: list[Any]):
        """Take the nodes, the root last."""
        self.below, self.containers = nodes[:-1], [container(node) for node in nodes]
        self.lists = [node for node in self.below if type(node) in (list, dict)]
        self.slots: list[Any] = []
        self.tuples: list[tuple[Any, Any]] = []
        self._sized = [c for c in self.containers if c is not None]
        self._sealed: tuple[int, int] | None = None

    def seal(self) -> None:
        """Remember who holds the nodes now: nobody but this tree and what is remembered of it."""
        self._sealed = self._counts()

    @property
    def sealed(self) -> bool:
        """Whether it is known who holds the nodes; those of a dead tree are held by as many again."""
        return self._sealed is not None

    def unshared(self) -> bool:
        """Whether nobody else holds a node below the root, and nobody put anything into one."""
        return self._counts() == self._sealed

    def _counts(self) -> tuple[int, int]:
        """References to the nodes, and entries in them: a holder adds to the first, a cached value to the other.

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
    """Where a node's children can be put: a module's dict, a list or dict itself, None for a tuple."""
    if isinstance(node, eqx.Module):
        return get(node, "__dict__")
    return None if isinstance(node, tuple) else node
