"""The forward pass of all families: norms, grouped-query attention and gated MLPs; layers are unrolled."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Num

from fullstride.llm.config import ModelConfig
from fullstride.llm.kernels.interface import AttentionShape, Kernels, QKNorm, StepBatch
from fullstride.llm.models.adapters import AdapterSlots, adapted
from fullstride.llm.models.experts import routed
from fullstride.llm.models.layer_parts import gate, norm, normalized_heads, scaled
from fullstride.llm.models.parameters import Layer, Weights
from fullstride.llm.packed.matrix import PackedMatrix, Weight

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
        pool: KV cache of the layers of a group, updated in place; of all layers if the batch has one group.
        batch: tokens of the step.
        block: tokens of a KV cache block.

    """
    devices = 1 if kernels.axis is None else lax.axis_size(kernels.axis)
    heads, kv_heads = config.heads // devices, config.kv_heads // devices
    scale = config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
    shape = AttentionShape(
        heads, kv_heads, config.head_dim, block, scale=scale, eps=config.rms_eps, cap=config.attention_cap
    )
    x = _look_up(weights.embed, batch.tokens, kernels.axis, weights.norm.dtype)
    x = scaled(x, config.embedding_scale, rounded=config.rounded_scale)
    if (
        kernels.fused_layers is not None
        and not batch.tiles.shape[-2]
        and batch.rows.shape[-2] <= kernels.fused_layers.rows
    ):
        return kernels.fused_layers.run(weights, x, pool, batch, block)

    # Traced once for all layers of a kind, though XLA sees every one with its number as a constant.
    @partial(jax.jit, static_argnames=("shape", "rotated"))
    def step(layer, index, x, pool, batch, shape, rotated):
        return _layer(config, kernels, layer, index, x, pool, batch if rotated else _unrotated(batch), shape)

    batches, places = _by_group(config, batch)
    for index, layer in enumerate(weights.layers):
        own, (group, place) = shape._replace(window=config.window(index)), places[index]
        x, pool = step(layer, jnp.int32(place), x, pool, batches[group], own, index not in config.unrotated)
    # XLA might move an axis of one head, which costs it a copy of the pool at each end of a program or loop.
    return x, _in_place(pool) if pool.shape[3] == 1 else pool


def _by_group(config: ModelConfig, batch: StepBatch) -> tuple[list[StepBatch], dict[int, tuple[int, int]]]:
    """Return the batch of each group of layers, and of each layer its group and its place in the pool."""
    if batch.rows.ndim == 2:
        return [batch], {i: (0, i) for i in range(config.layers)}
    groups = config.cache_groups
    batches = [
        batch._replace(slots=batch.slots[i], rows=batch.rows[i], tiles=batch.tiles[i]) for i in range(len(groups))
    ]
    return batches, {layer: (group, i) for group, own in enumerate(groups) for i, layer in enumerate(own)}


# Compiled by itself: JAX takes a constraint on a program's output for a wish, which a donated pool could not grant.
@jax.jit
def _in_place(pool: Pool) -> Pool:
    return with_layout_constraint(pool, Layout(tuple(range(pool.ndim))))


def _unrotated(batch: StepBatch) -> StepBatch:
    """Angles of zero, which leave queries and keys as they are, bit for bit."""
    return batch._replace(cos=jnp.ones_like(batch.cos), sin=jnp.zeros_like(batch.sin))


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
    if shape.window is not None and batch.window_cos is not None and batch.window_sin is not None:
        batch = batch._replace(cos=batch.window_cos, sin=batch.window_sin)
    batch = batch._replace(window_cos=None, window_sin=None)
    slots = layer.adapters or {}
    read, add = partial(_read, config, kernels, batch), partial(_add, config, kernels, batch)
    qkv = read(x, layer.attn_norm, layer.qkv, slots.get("qkv"), layer.qkv_bias)
    norms = None if layer.q_norm is None or layer.k_norm is None else QKNorm(layer.q_norm, layer.k_norm)
    if norms is not None and (config.wide_qk_norm or config.exact_norm):
        qkv, norms = normalized_heads(config, qkv, norms, shape), None
    mixed, pool = kernels.attention(qkv, pool, index, batch, norms, shape, sinks=layer.sinks)
    x = add(mixed, layer.o, x, slots.get("o"), layer.attn_post_norm, bias=layer.o_bias)
    if layer.router is not None:
        return routed(config, kernels, layer, x), pool
    wide = read(x, layer.mlp_norm, layer.gate_up, slots.get("gate_up"))
    if config.activation == "silu":
        return add(wide, layer.down, x, slots.get("down"), layer.mlp_post_norm, gated=True), pool
    return add(gate(config, wide), layer.down, x, slots.get("down"), layer.mlp_post_norm), pool


def _read(
    config: ModelConfig,
    kernels: Kernels,
    batch: StepBatch,
    x: Array,
    weight: Array | None,
    matrix: Weight,
    slots: AdapterSlots | None = None,
    bias: Array | None = None,
) -> Array:
    """Project the residual stream, through a norm if there is one; kernel sets know the one that rounds first."""
    normal = x if weight is None or (slots is None and not config.exact_norm) else norm(config, x, weight)
    if weight is None or config.exact_norm:
        y = kernels.project(normal, matrix, bias=bias)
    else:
        y = kernels.project(x, matrix, norm=(weight, config.rms_eps), bias=bias)
    return adapted(y, normal, slots, batch)


def _add(
    config: ModelConfig,
    kernels: Kernels,
    batch: StepBatch,
    x: Array,
    matrix: Weight,
    residual: Array,
    slots: AdapterSlots | None = None,
    weight: Array | None = None,
    gated: bool = False,
    bias: Array | None = None,
) -> Array:
    """Add a projection to the residual stream; each of several devices has a part of its inputs."""
    read = gate(config, x) if gated and slots is not None else x
    if kernels.axis is None and weight is None and config.residual_scale == 1:
        return adapted(kernels.project(x, matrix, gated=gated, bias=bias, residual=residual), read, slots, batch)
    part = adapted(kernels.project(x, matrix, gated=gated), read, slots, batch)
    if kernels.axis is not None:
        part = lax.psum(part, kernels.axis) if kernels.all_reduce is None else kernels.all_reduce(part)
    if bias is not None:
        part = part + bias
    if weight is not None:
        part = norm(config, part, weight)
    return residual + scaled(part, config.residual_scale)


def _look_up(
    table: Float[Array, "part hidden"] | PackedMatrix, tokens: Int[Array, " T"], axis: str | None, dtype: DTypeLike
) -> Float[Array, "T hidden"]:
    """Look up embeddings; each of several devices has a part of the vocabulary, and zeros for the rest."""
    rows = partial(table.rows, dtype=dtype) if isinstance(table, PackedMatrix) else table.__getitem__
    if axis is None:
        return rows(tokens)
    own = tokens - lax.axis_index(axis) * table.shape[0]
    mine = (own >= 0) & (own < table.shape[0])
    return lax.psum(jnp.where(mine[:, None], rows(jnp.where(mine, own, 0)), 0), axis)


def logits(
    config: ModelConfig, kernels: Kernels, weights: Weights, hidden: Float[Array, "D hidden"]
) -> Float[Array, "D vocab"]:
    """Return the logits of all tokens, fp32; gathered over devices, so that all have bitwise equal values."""
    head = weights.embed if weights.head is None else weights.head
    if config.exact_norm:
        scores = kernels.project(norm(config, hidden, weights.norm), head, exact=True)
    else:
        scores = kernels.project(hidden, head, norm=(weights.norm, config.rms_eps), exact=True)
    if config.logit_divisor != 1:
        scores = scores / config.logit_divisor
    if config.logit_cap is not None:
        scores = jnp.tanh(scores / config.logit_cap) * config.logit_cap
    if kernels.axis is None:
        return scores
    # Whatever the last sums differ by, what a loop's end depends on must not.
    return lax.all_gather(scores, kernels.axis, axis=1, tiled=True)[:, : config.vocab_size]
