"""Projections and norms in plain JAX, and the set of plain kernels."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from fullstride.llm.kernels.interface import Kernels
from fullstride.llm.kernels.xla.attention import attention, rms_norm
from fullstride.llm.kernels.xla.few_rows import dot
from fullstride.llm.kernels.xla.sampling import sample, score
from fullstride.llm.packed.matrix import JoinedMatrix, PackedMatrix, Weight, product

# Of x, the matrix and the dtype of the result.
PackedDot = Callable[[Array, PackedMatrix, Any], Array]


def project(
    x: Float[Array, "T wide"],
    weight: Weight,
    *,
    norm: tuple[Float[Array, " inner"], float] | None = None,
    gated: bool = False,
    bias: Float[Array, " out"] | None = None,
    residual: Float[Array, "T out"] | None = None,
    exact: bool = False,
    packed: PackedDot = product,
) -> Float[Array, "T out"]:
    """See `Project`; sums are fp32, and so is the result if `exact`, as logits are.

    `packed` computes x W^T of a packed matrix, of the dtype that it is given.
    """
    if norm is not None:
        x = rms_norm(x, *norm)
    if gated:
        gate, up = jnp.split(x, 2, axis=-1)
        x = jax.nn.silu(gate) * up
    y = _product(x, weight, jnp.float32 if exact else x.dtype, packed)
    if bias is not None:
        y = y + bias
    return y if residual is None else y + residual


def _product(x: Float[Array, "T inner"], weight: Weight, kind: DTypeLike, packed: PackedDot) -> Float[Array, "T out"]:
    if isinstance(weight, JoinedMatrix):
        return jnp.concatenate([_product(x, part, kind, packed) for part in weight.parts], axis=1)
    if isinstance(weight, PackedMatrix):
        return packed(x, weight, kind)
    return dot(x, weight, kind)


def plain(dynamic: bool) -> Kernels:
    """The set; `dynamic` walks as far as the longest context, which a GPU would have to ask the host about."""
    return Kernels("plain", dynamic, project, partial(attention, dynamic=dynamic), sample, score)
