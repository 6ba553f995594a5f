"""An optax transformation and its state as one module."""

from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax

from fullstride.step.jax.apply import optimized
from fullstride.step.jax.trainable import partitioned
from fullstride.step.jax.update import Transformation


@dataclass(frozen=True)
class Filter:
    """A tree of functions and booleans, with the hash that a list or dict in it would not have."""

    treedef: Any
    leaves: tuple[Any, ...]

    @classmethod
    def of(cls, wrt: Any) -> "Filter":
        """Take a filter apart."""
        leaves, treedef = jax.tree.flatten(wrt)
        return cls(treedef, tuple(leaves))

    @property
    def tree(self) -> Any:
        """The filter."""
        return jax.tree.unflatten(self.treedef, self.leaves)


class Optimizer(eqx.Module):
    """`model, optimizer = optimizer(grads, model)`: the state is a tree of arrays, all the rest is static.

    Attributes:
        opt_state: optax's state.
        tx: the transformation.
        wrt: which leaves of a model are trained; its `tree` is a filter as `equinox.filter` takes it.

    """

    opt_state: Any
    tx: Transformation = eqx.field(static=True)
    wrt: Filter = eqx.field(static=True)

    @classmethod
    def create(cls, tx: Transformation, model: Any, wrt: Any = eqx.is_inexact_array) -> "Optimizer":
        """The optimizer of a model before the first step.

        Raises:
            ConfigError: where no leaf is trained, or one that is has no gradient.

        """
        _, params, _ = partitioned(model, wrt)
        with jax.numpy_dtype_promotion("standard"):
            return cls(tx.init(params), tx, Filter.of(wrt))

    def __call__(self, grads: Any, model: Any, loss: Any = None) -> tuple[Any, "Optimizer"]:
        """The model and the optimizer after an update; transformations that want the loss get it as `value`."""
        params, opt_state = optimized(self.tx, eqx.filter(model, self.wrt.tree), self.opt_state, grads, loss)
        return eqx.combine(params, model), Optimizer(opt_state, self.tx, self.wrt)
