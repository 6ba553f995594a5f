"""Products of few rows on a CPU, in the one form for which XLA reads the weights about once."""

from functools import partial

import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.typing import DTypeLike
from jaxtyping import Array, Float

# Rows of such a product, at most; one row is a product with a vector, which is fast in any form.
FEW = 32


def dot(x: Float[Array, "T inner"], weight: Float[Array, "out inner"], kind: DTypeLike) -> Float[Array, "T out"]:
    """x W^T with a result of dtype `kind`.

    XLA's CPU backend repacks the weights for two to about 32 rows, which takes as long as two to three products with a
    vector. It has a kernel without repacking for W x^T, if x^T lies in memory by rows (1.6 times a product with a
    vector for eight rows of SmolLM2's sizes).
    """
    if 1 < x.shape[0] <= FEW and x.dtype == jnp.float32:
        return lax.platform_dependent(x, weight, cpu=partial(_turned, kind=kind), default=partial(_dot, kind=kind))
    return _dot(x, weight, kind)


def _dot(x: Array, weight: Array, kind: DTypeLike) -> Array:
    # TF32 would be a silent loss for whoever asked for fp32.
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return lax.dot_general(x, weight, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=kind)


def _turned(x: Array, weight: Array, kind: DTypeLike) -> Array:
    # XLA would fold either transposition into the product, and with it lose the form.
    turned = with_layout_constraint(x.T, Layout((0, 1)))
    product = lax.dot_general(weight, turned, (((1,), (0,)), ((), ())), preferred_element_type=kind)
    return lax.optimization_barrier(product).T
