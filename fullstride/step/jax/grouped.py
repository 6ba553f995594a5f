"""How the leaves of a state lie in buffers: each in its own, or those of one shape and one treatment in one.

Fewer buffers are fewer to hand over, and fewer kernels update them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from fullstride.step.jax.batched import Batched, Lane

# function(leaves, gradients, loss) returns the new leaves and a report.
Update = Callable[..., Any]
Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Grouped:
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

    @classmethod
    def flat(cls, leaves: int, trainable: int) -> "Grouped":
        """One buffer for each leaf."""
        return cls(tuple((i,) for i in range(leaves)), trainable)

    @property
    def is_flat(self) -> bool:
        """Tell whether the buffers are the leaves themselves."""
        return all(len(group) == 1 for group in self.groups)

    def pack(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """The buffers of these leaves."""
        return tuple(_together([leaves[i] for i in group]) for group in self.groups)

    def pack_shardings(self, leaves: Sequence[Any], stacked: Callable[[Any], Any]) -> tuple[Any, ...]:
        """The buffers' shardings from the leaves'; `stacked` adds a first axis to one."""
        return tuple(leaves[g[0]] if len(g) == 1 else stacked(leaves[g[0]]) for g in self.groups)

    def unpack(self, buffers: Sequence[Any]) -> tuple[Any, ...]:
        """The leaves in these buffers, inside a compiled function."""
        return tuple(map(Batched().leaf, self.lanes(self.groups, buffers)))

    def unpack_eagerly(self, buffers: Sequence[Any]) -> tuple[Any, ...]:
        """The same outside of one."""
        return tuple(buffers) if self.is_flat else _unpacked(self, tuple(buffers))

    def update(self, function: Update, buffers: Sequence[Any], grads: Sequence[Any], loss: Any) -> Any:
        """The new buffers, and the report, of an update that is written for leaves."""
        if self.is_flat:
            return function(buffers, grads, loss)
        batched = Batched()
        new, report = self.evaluated(batched, function, buffers, grads, loss)
        return tuple(_gathered(batched, [new[i] for i in group]) for group in self.groups), report

    def evaluated(
        self, batched: Batched, function: Update, buffers: Sequence[Any], grads: Sequence[Any], loss: Any
    ) -> tuple[list[Any], Any]:
        """The new leaves, in lanes where they could be, and the report."""
        parameters = tuple(group for group in self.groups if group[0] < self.trainable)
        stacks = [_together([grads[i] for i in group]) for group in parameters]
        leaves, gradients = self.lanes(self.groups, buffers), self.lanes(parameters, stacks)
        kinds = jax.tree.map(_kind, (leaves, gradients, loss), is_leaf=lambda x: isinstance(x, Lane))
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*kinds)
        out = batched.run(closed.jaxpr, closed.consts, [*leaves, *gradients, loss])
        new, report = jax.tree.unflatten(
            jax.tree.structure(shape), [x if isinstance(x, Lane) else batched.leaf(x) for x in out]
        )
        return list(new), jax.tree.map(batched.leaf, report, is_leaf=lambda x: isinstance(x, Lane))

    @staticmethod
    def lanes(groups: Groups, buffers: Sequence[Any]) -> list[Any]:
        """What stands for each leaf, by its number."""
        placed = {
            leaf: Lane(buffer, i) if len(group) > 1 else buffer
            for group, buffer in zip(groups, buffers, strict=True)
            for i, leaf in enumerate(group)
        }
        return [placed[i] for i in sorted(placed)]


def _together(leaves: list[Any]) -> Any:
    return leaves[0] if len(leaves) == 1 else jnp.stack(leaves)


@partial(jax.jit, static_argnums=0)
def _unpacked(layout: Grouped, buffers: tuple[Any, ...]) -> tuple[Any, ...]:
    return layout.unpack(buffers)


def _kind(x: Any) -> jax.ShapeDtypeStruct:
    """The shape of a leaf; of a lane, that of one of its stack."""
    return jax.ShapeDtypeStruct(x.stack.shape[1:] if isinstance(x, Lane) else x.shape, _array(x).dtype)


def _array(x: Any) -> Any:
    return x.stack if isinstance(x, Lane) else x


def _gathered(batched: Batched, leaves: list[Any]) -> Any:
    """The buffer of a group's new leaves: a stack as it is where they are all of its lanes, in order."""
    first = leaves[0]
    if isinstance(first, Lane) and all(_in_place(x, first.stack, i) for i, x in enumerate(leaves)):
        return first.stack
    return _together([batched.leaf(x) for x in leaves])


def _in_place(x: Any, stack: Any, index: int) -> bool:
    return isinstance(x, Lane) and x.stack is stack and x.index == index
