"""Layout of a state's leaves in buffers: each in its own, or those of one shape and one treatment in one.

Fewer buffers are fewer to hand over, and fewer kernels update them. Leaves can share one that are equal in shape and
dtype, and treated alike by the update.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from fullstride.step.jax.batched import Batched, StackedLeaf

# function(leaves, gradients, loss) returns the new leaves and a report.
Update = Callable[..., Any]
Groups = tuple[tuple[int, ...], ...]
# Splitting ends by itself; an update that treats leaves differently at each look would be split up completely.
ROUNDS = 8
# For each parameter the leaves that belong to it, itself first: where in the state each lies, and its number.
Family = tuple[tuple[Any, int], ...]


@dataclass(frozen=True)
class GroupedLeaves:
    """Groups of leaves, each in a buffer with a new first axis; a group of one is the leaf itself.

    A parameter lies with its likes, and what an optimizer keeps for them lies in the same order in buffers of its own:
    an elementwise update then reads and writes each element of the state once, in place. Parameter and moments in one
    buffer would be copied at each step.

    Attributes:
        groups: the leaves' numbers, buffer by buffer.
        trainable: the first so many leaves are the parameters, which have gradients.

    """

    groups: Groups
    trainable: int

    @property
    def is_flat(self) -> bool:
        """True if the buffers are the leaves themselves."""
        return all(len(group) == 1 for group in self.groups)

    def pack(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """Return the buffers of these leaves."""
        return tuple(_together([leaves[i] for i in group]) for group in self.groups)

    def unpack(self, buffers: Sequence[Any]) -> tuple[Any, ...]:
        """Return the leaves in these buffers, inside a compiled function."""
        return tuple(map(Batched().leaf, self.lanes(self.groups, buffers)))

    def unpack_eagerly(self, buffers: Sequence[Any]) -> tuple[Any, ...]:
        """Unpack the buffers outside of a trace."""
        return tuple(buffers) if self.is_flat else _unpacked(self, tuple(buffers))

    def update(self, function: Update, buffers: Sequence[Any], grads: Sequence[Any], loss: Any) -> Any:
        """Apply an update that is written for leaves; return the new buffers and the report."""
        if self.is_flat:
            return function(buffers, grads, loss)
        batched = Batched()
        new, report = self.evaluated(batched, function, buffers, grads, loss)
        return tuple(_gathered(batched, [new[i] for i in group]) for group in self.groups), report

    def evaluated(
        self, batched: Batched, function: Update, buffers: Sequence[Any], grads: Sequence[Any], loss: Any
    ) -> tuple[list[Any], Any]:
        """Return the new leaves, stacked if possible, and the report."""
        parameters = tuple(group for group in self.groups if group[0] < self.trainable)
        stacks = [_together([grads[i] for i in group]) for group in parameters]
        leaves, gradients = self.lanes(self.groups, buffers), self.lanes(parameters, stacks)
        kinds = jax.tree.map(_kind, (leaves, gradients, loss), is_leaf=lambda x: isinstance(x, StackedLeaf))
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*kinds)
        out = batched.run(closed.jaxpr, closed.consts, [*leaves, *gradients, loss])
        new, report = jax.tree.unflatten(
            jax.tree.structure(shape), [x if isinstance(x, StackedLeaf) else batched.leaf(x) for x in out]
        )
        return list(new), jax.tree.map(batched.leaf, report, is_leaf=lambda x: isinstance(x, StackedLeaf))

    @staticmethod
    def lanes(groups: Groups, buffers: Sequence[Any]) -> list[Any]:
        """Return each leaf's buffer, or its `StackedLeaf`, in the leaves' order."""
        placed = {
            leaf: StackedLeaf(buffer, i) if len(group) > 1 else buffer
            for group, buffer in zip(groups, buffers, strict=True)
            for i, leaf in enumerate(group)
        }
        return [placed[i] for i in sorted(placed)]


def _together(leaves: list[Any]) -> Any:
    return leaves[0] if len(leaves) == 1 else jnp.stack(leaves)


@partial(jax.jit, static_argnums=0)
def _unpacked(layout: GroupedLeaves, buffers: tuple[Any, ...]) -> tuple[Any, ...]:
    return layout.unpack(buffers)


def _kind(x: Any) -> jax.ShapeDtypeStruct:
    """The shape of a leaf; of a lane, that of one of its stack."""
    if isinstance(x, StackedLeaf):
        return jax.ShapeDtypeStruct(x.stack.shape[1:], x.stack.dtype)
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _gathered(batched: Batched, leaves: list[Any]) -> Any:
    """Return the buffer of a group's new leaves: an existing stack if they are all of its lanes, in order."""
    first = leaves[0]
    if all(isinstance(x, StackedLeaf) and x.stack is first.stack and x.index == i for i, x in enumerate(leaves)):
        return first.stack
    return _together([batched.leaf(x) for x in leaves])


def grouped_layout(
    paths: Sequence[Any], leaves: Sequence[Any], trainable: int, update: Update, loss: Any
) -> GroupedLeaves:
    """Return the layout of a state with the fewest buffers that need no copy of the state in any step.

    Args:
        paths: JAX's path of each leaf; the parameters come first, and below some other path their moments.
        leaves: shapes and dtypes.
        trainable: how many parameters there are.
        update: as `Grouped.update` takes it; it is traced, not run.
        loss: shape and dtype of the loss.

    """
    families = _families(paths, trainable)
    kinds = [(x.shape, x.dtype, getattr(x, "sharding", None)) for x in leaves]
    parts = _by(range(trainable), lambda k: tuple((place, kinds[i]) for place, i in families[k]))
    for _ in range(ROUNDS):
        layout = _layout(parts, families, len(leaves), trainable)
        split = _split(layout, parts, families, leaves, update, loss)
        if split == parts:
            return layout
        parts = split
    return _layout(tuple((k,) for k in range(trainable)), families, len(leaves), trainable)


def _families(paths: Sequence[Any], trainable: int) -> list[Family]:
    """A leaf belongs to the parameter whose path, without its own first step, ends the leaf's path."""
    tails = {tuple(path[1:]): k for k, path in enumerate(paths[:trainable])}
    families: list[list[tuple[Any, int]]] = [[("", k)] for k in range(trainable)]
    for i, path in enumerate(paths[trainable:], trainable):
        cut = next((n for n in range(1, len(path)) if tuple(path[n:]) in tails), None)
        if cut is not None:
            families[tails[tuple(path[cut:])]].append((tuple(path[:cut]), i))
    return [tuple(family) for family in families]


def _by(members: Iterable[int], feature: Any) -> Groups:
    """Group members with the same feature; groups are in the order of their first members."""
    found: dict[Any, list[int]] = {}
    for member in members:
        found.setdefault(feature(member), []).append(member)
    return tuple(map(tuple, found.values()))


def _layout(parts: Groups, families: Sequence[Family], leaves: int, trainable: int) -> GroupedLeaves:
    columns = [
        tuple(i for _, i in column) for part in parts for column in zip(*(families[k] for k in part), strict=True)
    ]
    placed = {i for column in columns for i in column}
    columns += [(i,) for i in range(leaves) if i not in placed]
    return GroupedLeaves(tuple(sorted(columns)), trainable)


def _split(
    layout: GroupedLeaves, parts: Groups, families: Sequence[Family], leaves: Sequence[Any], update: Update, loss: Any
) -> Groups:
    """Split the parts if the update treats their members differently."""
    found: dict[int, Any] = {}

    def look(buffers: Any, grads: Any, loss: Any) -> None:
        new, _ = layout.evaluated(Batched(), update, buffers, grads, loss)
        for part in parts:
            for position, k in enumerate(part):
                found[k] = tuple(_treatment(new[i], position) for _, i in families[k])

    buffers = jax.eval_shape(layout.pack, list(leaves))
    jax.eval_shape(look, buffers, list(leaves[: layout.trainable]), loss)
    return tuple(piece for part in parts for piece in _by(part, found.__getitem__))


def _treatment(new: Any, position: int) -> Any:
    """Return a key that is equal for members of a group that move alike; any other member has its own."""
    if not isinstance(new, StackedLeaf):
        return id(new)
    return id(new.stack), new.index - position
