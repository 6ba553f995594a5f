"""Which leaves can share a buffer: equal in shape and dtype, and treated alike by the update."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax

from fullstride.step.jax.batched import Batched, Lane
from fullstride.step.jax.grouped import Grouped, Groups, Update

# Splitting ends by itself; an update that treats leaves differently at each look would be split up completely.
ROUNDS = 8
# For each parameter the leaves that belong to it, itself first: where in the state each lies, and its number.
Family = tuple[tuple[Any, int], ...]


def grouped_layout(paths: Sequence[Any], leaves: Sequence[Any], trainable: int, update: Update, loss: Any) -> Grouped:
    """The layout of a state with as few buffers as can be without a copy of the state in any step.

    Args:
        paths: JAX's path of each leaf; the parameters come first, and below some other path their moments.
        leaves: shapes and dtypes.
        trainable: how many parameters there are.
        update: as `Grouped.update` takes it; it is traced, not run.
        loss: shape and dtype of the loss.

    """
    families = _families(paths, trainable)
    parts = _by(range(trainable), lambda k: tuple((place, _kind(leaves[i])) for place, i in families[k]))
    for _ in range(ROUNDS):
        layout = _layout(parts, families, len(leaves), trainable)
        split = _split(layout, parts, families, leaves, update, loss)
        if split == parts:
            return layout
        parts = split
    return _layout(tuple((k,) for k in range(trainable)), families, len(leaves), trainable)


def _kind(leaf: Any) -> tuple[Any, ...]:
    return leaf.shape, leaf.dtype, getattr(leaf, "sharding", None)


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
    """Members with the same feature together, each group where its first member was."""
    found: dict[Any, list[int]] = {}
    for member in members:
        found.setdefault(feature(member), []).append(member)
    return tuple(map(tuple, found.values()))


def _layout(parts: Groups, families: Sequence[Family], leaves: int, trainable: int) -> Grouped:
    columns = [
        tuple(i for _, i in column) for part in parts for column in zip(*(families[k] for k in part), strict=True)
    ]
    placed = {i for column in columns for i in column}
    columns += [(i,) for i in range(leaves) if i not in placed]
    return Grouped(tuple(sorted(columns)), trainable)


def _split(
    layout: Grouped, parts: Groups, families: Sequence[Family], leaves: Sequence[Any], update: Update, loss: Any
) -> Groups:
    """The parts, divided where the update gives their members different treatment."""
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
    """The same for members of a group that stay in place, or that all get one value; else one's own."""
    if not isinstance(new, Lane):
        return id(new)
    return id(new.stack), new.index - position
