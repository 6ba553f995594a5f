"""The forward pass of Llama, Qwen2 and Qwen3: pre-norm, grouped-query attention, SwiGLU; layers are unrolled."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fullstride.llm.config import ModelConfig
from fullstride.llm.kernels import Batch, Kernels, QKNorm, Shape
from fullstride.llm.models.parameters import Layer, Weights

Pool = Float[Array, "layers 2 slots kv_heads head_dim"]


def hidden_states(
    config: ModelConfig, kernels: Kernels, weights: Weights, pool: Pool, batch: Batch, block: int
) -> tuple[Float[Array, "T hidden"], Pool]:
    """What the last layer leaves, before the last norm, and the pool with the batch's keys and values.

    Args:
        config: of the model.
        kernels: that do the work.
        weights: on the device.
        pool: of keys and values, to be updated in place.
        batch: the tokens; see `Batch`.
        block: tokens of a block of the pool.

    """
    shape = Shape(config.heads, config.kv_heads, config.head_dim, block, config.head_dim**-0.5, config.rms_eps)
    x = weights.embed[batch.tokens]

    # Traced once for all layers, though XLA sees every one with its number as a constant.
    @jax.jit
    def step(layer, index, x, pool, batch):
        return _layer(config, kernels, layer, index, x, pool, batch, shape)

    for index, layer in enumerate(weights.layers):
        x, pool = step(layer, jnp.int32(index), x, pool, batch)
    return x, pool


def _layer(
    config: ModelConfig, kernels: Kernels, layer: Layer, index: Array, x: Array, pool: Pool, batch: Batch, shape: Shape
) -> tuple[Array, Pool]:
    qkv = kernels.project(x, layer.qkv, norm=(layer.attn_norm, config.rms_eps), bias=layer.qkv_bias)
    norms = None if layer.q_norm is None or layer.k_norm is None else QKNorm(layer.q_norm, layer.k_norm)
    mixed, pool = kernels.attention(qkv, pool, index, batch, norms, shape)
    x = kernels.project(mixed, layer.o, residual=x)
    wide = kernels.project(x, layer.gate_up, norm=(layer.mlp_norm, config.rms_eps))
    return kernels.project(wide, layer.down, gated=True, residual=x), pool


def logits(
    config: ModelConfig, kernels: Kernels, weights: Weights, hidden: Float[Array, "D hidden"]
) -> Float[Array, "D vocab"]:
    """Scores of all tokens, fp32."""
    head = weights.embed if weights.head is None else weights.head
    return kernels.project(hidden, head, norm=(weights.norm, config.rms_eps), exact=True)
