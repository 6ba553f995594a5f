"""RMSNorm and rotary embedding in plain JAX."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def rms_norm(x: Float[Array, "*rows width"], weight: Float[Array, " width"], eps: float) -> Float[Array, "*rows width"]:
    """x / rms(x) * weight; the mean is fp32, and the quotient is rounded before it is scaled, as the models' own is."""
    wide = x.astype(jnp.float32)
    normal = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return weight * normal.astype(x.dtype)


def rotate(
    x: Float[Array, "T heads head_dim"], cos: Float[Array, "T half"], sin: Float[Array, "T half"]
) -> Float[Array, "T heads head_dim"]:
    """Rotary embedding (arXiv:2104.09864) in the half-split order: element i turns with element i + head_dim / 2."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
