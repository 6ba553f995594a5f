"""Means that say what they are means over, so that they stay exact where a batch is divided."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fullstride.step.jax.precision import wide


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mean:
    """`total / weight`: a loss or a metric whose parts weigh differently, such as one over a number of tokens.

    Over micro-batches totals and weights are added up before the one is divided by the other, so that loss, gradients
    and metrics are those of the whole batch; a loss that divides by itself makes a rare token of a short part count
    more than one of a long part.

    Attributes:
        total: a sum; of a loss a floating scalar, of a metric any array.
        weight: what it is a sum over, a real number or an array that goes with `total`. It is taken for a constant: no
            gradient flows through it.

    """

    total: Any
    weight: Any

    @property
    def value(self) -> Float[Array, "..."]:
        """The mean in fp32 or better; 0 where both total and weight are."""
        total = _floating(self.total)
        return total / self.divisor.astype(total.dtype)

    @property
    def divisor(self) -> Float[Array, "..."]:
        """The weight, or 1 where total and weight are 0: of a part in which nothing counts nothing is expected."""
        weight = jax.lax.stop_gradient(_floating(self.weight))
        nothing = (weight == 0) & (_floating(self.total) == 0)
        return jnp.where(nothing, jnp.ones_like(weight), weight)


def _floating(x: Any) -> Array:
    x = jnp.asarray(x)
    return x.astype(wide(x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else jnp.result_type(float))


def is_mean(x: Any) -> bool:
    """Whether something is a `Mean`."""
    return isinstance(x, Mean)


def values(tree: Any) -> Any:
    """The tree with the value of each `Mean` in its place."""
    return jax.tree.map(lambda x: x.value if is_mean(x) else x, tree, is_leaf=is_mean)
