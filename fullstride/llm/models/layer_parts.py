"""Parts of layers that kernel sets do not fuse, in plain JAX."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fullstride.llm.config import ModelConfig
from fullstride.llm.kernels.interface import AttentionShape, QKNorm
from fullstride.llm.kernels.xla.attention import exact_rms_norm, rms_norm

# Of GPT-OSS's activation.
SWIGLU_ALPHA = 1.702


def norm(
    config: ModelConfig, x: Float[Array, "*rows width"], weight: Float[Array, " width"]
) -> Float[Array, "*rows width"]:
    """RMSNorm as the model has it."""
    if config.exact_norm:
        return exact_rms_norm(x, weight, config.rms_eps, config.norm_offset)
    return rms_norm(x, weight, config.rms_eps)


def normalized_heads(
    config: ModelConfig, qkv: Float[Array, "T wide"], norms: QKNorm, shape: AttentionShape
) -> Float[Array, "T wide"]:
    """Normalize queries and keys, each head by itself or all of them at once."""
    q, k, v = jnp.split(qkv, (shape.heads * shape.head_dim, (shape.heads + shape.kv_heads) * shape.head_dim), axis=1)

    def apart(x: Array) -> Array:
        return x if config.wide_qk_norm else x.reshape(x.shape[0], -1, shape.head_dim)

    q, k = (norm(config, apart(x), weight).reshape(x.shape) for x, weight in ((q, norms.q), (k, norms.k)))
    return jnp.concatenate([q, k, v], axis=1)


def gate(config: ModelConfig, wide: Float[Array, "*rows double"]) -> Float[Array, "*rows inner"]:
    """f(gate) * up of a pair in one matrix; f is the model's activation. GPT-OSS's has up + 1, and bounds of both."""
    first, up = jnp.split(wide, 2, axis=-1)
    if config.activation == "swiglu_clamped":
        first, up = jnp.minimum(first, config.swiglu_limit), jnp.clip(up, -config.swiglu_limit, config.swiglu_limit)
        return (up + 1) * (first * jax.nn.sigmoid(first * SWIGLU_ALPHA))
    if config.activation == "gelu_tanh":
        return jax.nn.gelu(first, approximate=True) * up
    return jax.nn.silu(first) * up


def scaled(x: Float[Array, "*any"], factor: float, rounded: bool = False) -> Float[Array, "*any"]:
    """x times a factor, in fp32; or times the factor rounded to the dtype of x."""
    if factor == 1:
        return x
    if rounded:
        return x * jnp.asarray(factor, x.dtype)
    return (x.astype(jnp.float32) * factor).astype(x.dtype)
