"""The forward pass of Llama, Qwen2 and Qwen3: pre-norm, grouped-query attention, SwiGLU; layers are unrolled."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float, Int, Num

from fullstride.llm.config import ModelConfig
from fullstride.llm.kernels.interface import AttentionShape, Kernels, QKNorm, StepBatch
from fullstride.llm.models.parameters import Layer, Weights

Pool = Num[Array, "layers 2 slots kv_heads head_dim"]


def hidden_states(
    config: ModelConfig, kernels: Kernels, weights: Weights, pool: Pool, batch: StepBatch, block: int
) -> tuple[Float[Array, "T hidden"], Pool]:
    """Compute the last layer's output, before the final norm, and the KV cache with the batch's keys and values.

    With `kernels.axis`, weights and pool are one device's shard (see `tensor_parallel`); all devices return the same,
    by two all-reduces per layer (arXiv:1909.08053).

    Args:
        config: the model's configuration.
        kernels: kernel set that computes the step.
        weights: the model's weights, on the device.
        pool: KV cache, updated in place.
        batch: tokens of the step.
        block: tokens of a KV cache block.

    """
    devices = 1 if kernels.axis is None else lax.axis_size(kernels.axis)
    heads, kv_heads = config.heads // devices, config.kv_heads // devices
    shape = AttentionShape(heads, kv_heads, config.head_dim, block, config.head_dim**-0.5, config.rms_eps)
    x = _look_up(weights.embed, batch.tokens, kernels.axis)
    if (
        kernels.fused_layers is not None
        and not batch.tiles.shape[0]
        and batch.rows.shape[0] <= kernels.fused_layers.rows
    ):
        return kernels.fused_layers.run(weights, x, pool, batch, block)

    # Traced once for all layers, though XLA sees every one with its number as a constant.
    @jax.jit
    def step(layer, index, x, pool, batch):
        return _layer(config, kernels, layer, index, x, pool, batch, shape)

    for index, layer in enumerate(weights.layers):
        x, pool = step(layer, jnp.int32(index), x, pool, batch)
    # XLA might move an axis of one head, which costs it a copy of the pool at each end of a program or loop.
    return x, _in_place(pool) if pool.shape[3] == 1 else pool


# Compiled by itself: JAX takes a constraint on a program's output for a wish, which a donated pool could not grant.
@jax.jit
def _in_place(pool: Pool) -> Pool:
    return with_layout_constraint(pool, Layout(tuple(range(pool.ndim))))


def _layer(
    config: ModelConfig,
    kernels: Kernels,
    layer: Layer,
    index: Array,
    x: Array,
    pool: Pool,
    batch: StepBatch,
    shape: AttentionShape,
) -> tuple[Array, Pool]:
    qkv = kernels.project(x, layer.qkv, norm=(layer.attn_norm, config.rms_eps), bias=layer.qkv_bias)
    norms = None if layer.q_norm is None or layer.k_norm is None else QKNorm(layer.q_norm, layer.k_norm)
    mixed, pool = kernels.attention(qkv, pool, index, batch, norms, shape)
    x = _add(kernels, mixed, layer.o, x)
    wide = kernels.project(x, layer.gate_up, norm=(layer.mlp_norm, config.rms_eps))
    return _add(kernels, wide, layer.down, x, gated=True), pool


def _add(kernels: Kernels, x: Array, weight: Array, residual: Array, gated: bool = False) -> Array:
    """Add a projection to the residual stream; each of several devices has a part of its inputs."""
    if kernels.axis is None:
        return kernels.project(x, weight, gated=gated, residual=residual)
    part = kernels.project(x, weight, gated=gated)
    return residual + (lax.psum(part, kernels.axis) if kernels.all_reduce is None else kernels.all_reduce(part))


def _look_up(
    table: Float[Array, "part hidden"], tokens: Int[Array, " T"], axis: str | None
) -> Float[Array, "T hidden"]:
    """Look up embeddings; each of several devices has a part of the vocabulary, and zeros for the rest."""
    if axis is None:
        return table[tokens]
    own = tokens - lax.axis_index(axis) * table.shape[0]
    mine = (own >= 0) & (own < table.shape[0])
    return lax.psum(jnp.where(mine[:, None], table[jnp.where(mine, own, 0)], 0), axis)


def logits(
    config: ModelConfig, kernels: Kernels, weights: Weights, hidden: Float[Array, "D hidden"]
) -> Float[Array, "D vocab"]:
    """Return the logits of all tokens, fp32; gathered over devices, so that all have bitwise equal values."""
    head = weights.embed if weights.head is None else weights.head
    scores = kernels.project(hidden, head, norm=(weights.norm, config.rms_eps), exact=True)
    if kernels.axis is None:
        return scores
    # Whatever the last sums differ by, what a loop's end depends on must not.
    return lax.all_gather(scores, kernels.axis, axis=1, tiled=True)[:, : config.vocab_size]
