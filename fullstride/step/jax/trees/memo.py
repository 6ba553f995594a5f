"""Cache of the leaves of modules, looked up by identity for as long as the modules live."""

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from operator import is_
from typing import Any

import equinox as eqx
import numpy as np
from jax.core import Tracer

from fullstride.step.jax.trees.plans import ModuleNodes, RebuildPlan, UnplannableError, container
from fullstride.step.jax.trees.structure import Structure, split


@dataclass(eq=False, slots=True)
class ModuleLeaves:
    """Leaves of one module.

    Attributes:
        leaves: its arrays.
        structure: the rest of it.
        lists: its lists and dicts, which anyone may change, each with what was in it.
        shells: its nodes, if a plan made it.
        on_host: whether any of its arrays is NumPy's; none of a module that was made is.

    """

    leaves: tuple[Any, ...]
    structure: Structure
    lists: list[Any]
    shells: ModuleNodes | None
    on_host: bool = False

    def holds(self) -> bool:
        """Return whether the lists and dicts hold the same objects as before."""
        return all(_unchanged(now, before) for now, before in self.lists)


_RECORDS: dict[int, tuple[Any, ModuleLeaves]] = {}
_PLANS: "weakref.WeakKeyDictionary[Structure, RebuildPlan | None]" = weakref.WeakKeyDictionary()


def read(module: Any) -> ModuleLeaves:
    """Return the record of a module, from the cache if it was seen before and has not changed since."""
    known = _RECORDS.get(id(module))
    if known is not None and known[0]() is module and known[1].holds():
        return known[1]
    structure, (leaves,) = split(module)
    record = ModuleLeaves(leaves, structure, [], None, any(isinstance(x, np.ndarray) for x in leaves))
    if plan_of(structure) is not None:
        record.lists = list(_snapshots(module))
        remember(module, record)
    return record


def remember(module: Any, record: ModuleLeaves) -> None:
    """Cache a record for as long as the module lives; traced arrays are left out, since their trace ends."""
    if record.leaves and isinstance(record.leaves[0], Tracer):
        return
    number = id(module)
    try:
        _RECORDS[number] = weakref.ref(module, lambda _: _forget(number)), record
    except TypeError:
        # Its class has slots and no place for weak references: it is read anew each time.
        return


def _forget(number: int) -> None:
    """Forget a module that is dying; its nodes, if nobody else holds one, are cached for the next of its structure."""
    _, record = _RECORDS.pop(number, (None, None))
    if record is None or record.shells is None or not (record.holds() and record.shells.unshared()):
        return
    plan = plan_of(record.structure)
    if plan is not None:
        plan.keep(record.shells)


def made(structure: Structure, leaves: tuple[Any, ...]) -> Any:
    """Make a new module of these leaves, and cache its record."""
    plan = plan_of(structure)
    if plan is None:
        return structure.build(leaves)
    module, shells = plan.make(leaves)
    remember(module, ModuleLeaves(leaves, structure, _contents_of(shells), shells))
    if shells.sealed is None:
        shells.sealed = shells.counts()
    return module


def refill(record: ModuleLeaves, leaves: tuple[Any, ...]) -> None:
    """Put other leaves into a module, in place."""
    plan, shells = plan_of(record.structure), record.shells
    if plan is None or shells is None:
        raise ValueError("only a module that a plan made can be refilled")
    plan.fill(shells, leaves)
    record.leaves, record.lists = leaves, _contents_of(shells)


def plan_of(structure: Structure) -> RebuildPlan | None:
    """Return the plan of a structure, or None if it cannot have one."""
    if structure not in _PLANS:
        try:
            _PLANS[structure] = RebuildPlan(structure)
        except UnplannableError:
            _PLANS[structure] = None
    return _PLANS[structure]


def _contents_of(shells: ModuleNodes) -> list[tuple[Any, Any]]:
    return [(node, _contents(node)) for node in shells.lists]


def _snapshots(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Return the lists and dicts among a module's nodes, each with its contents."""
    if type(tree) in (list, dict):
        yield tree, _contents(tree)
    if isinstance(tree, eqx.Module | list | dict | tuple):
        held = tree if isinstance(tree, tuple) else container(tree)
        for child in held.values() if isinstance(held, dict) else held:
            yield from _snapshots(child)


def _contents(kept: Any) -> Any:
    return (tuple(kept), tuple(kept.values())) if type(kept) is dict else tuple(kept)


def _unchanged(now: Any, before: Any) -> bool:
    if type(now) is dict:
        return tuple(now) == before[0] and all(map(is_, now.values(), before[1]))
    return len(now) == len(before) and all(map(is_, now, before))
