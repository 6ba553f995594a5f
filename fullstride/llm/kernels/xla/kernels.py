"""Projections and norms in plain JAX, and the set of plain kernels."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fullstride.llm.kernels.interface import Kernels
from fullstride.llm.kernels.xla.attention import attention, rms_norm
from fullstride.llm.kernels.xla.few_rows import dot
from fullstride.llm.kernels.xla.sampling import sample, score


def project(
    x: Float[Array, "T wide"],
    weight: Float[Array, "out inner"],
    *,
    norm: tuple[Float[Array, " inner"], float] | None = None,
    gated: bool = False,
    bias: Float[Array, " out"] | None = None,
    residual: Float[Array, "T out"] | None = None,
    exact: bool = False,
) -> Float[Array, "T out"]:
    """See `Project`; sums are fp32, and so is the result if `exact`, as logits are."""
    if norm is not None:
        x = rms_norm(x, *norm)
    if gated:
        gate, up = jnp.split(x, 2, axis=-1)
        x = jax.nn.silu(gate) * up
    y = dot(x, weight, jnp.float32 if exact else x.dtype)
    if bias is not None:
        y = y + bias
    return y if residual is None else y + residual


def plain(dynamic: bool) -> Kernels:
    """The set; `dynamic` walks as far as the longest context, which a GPU would have to ask the host about."""
    return Kernels("plain", dynamic, project, partial(attention, dynamic=dynamic), sample, score)
