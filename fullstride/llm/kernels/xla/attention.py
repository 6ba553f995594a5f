"""RMSNorm, rotary embedding, and paged attention in plain JAX.

Attention is a walk over the block tables with a running softmax (arXiv:2205.14135).
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Num

from fullstride.llm.kernels.fp8_pool import first_scales, get_scales, numbers, quantize, set_scales
from fullstride.llm.kernels.interface import FP8_POOL, AttentionShape, QKNorm, StepBatch

Pool = Num[Array, "layers 2 slots kv_heads head_dim"]
# Tokens of context that one step of the walk reads: its length never changes what a row's softmax sums, nor in what
# order, so that neither the batch nor the size of the table changes the result.
WALK = 256


def rms_norm(x: Float[Array, "*rows width"], weight: Float[Array, " width"], eps: float) -> Float[Array, "*rows width"]:
    """x / rms(x) * weight; the mean is fp32, and the quotient is rounded before it is scaled, as the models' own is."""
    wide = x.astype(jnp.float32)
    normal = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return weight * normal.astype(x.dtype)


def exact_rms_norm(
    x: Float[Array, "*rows width"], weight: Float[Array, " width"], eps: float, offset: float
) -> Float[Array, "*rows width"]:
    """x / rms(x) * (offset + weight), all in fp32 and rounded at the end, as in OLMo 2 and Gemma."""
    wide = x.astype(jnp.float32)
    normal = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (normal * (offset + weight.astype(jnp.float32))).astype(x.dtype)


def rotate(
    x: Float[Array, "T heads head_dim"], cos: Float[Array, "T half"], sin: Float[Array, "T half"]
) -> Float[Array, "T heads head_dim"]:
    """Rotary embedding (arXiv:2104.09864) in the half-split order: element i turns with element i + head_dim / 2."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def attention(
    qkv: Float[Array, "T wide"],
    pool: Pool,
    layer: Int[Array, ""],
    batch: StepBatch,
    norms: QKNorm | None,
    shape: AttentionShape,
    *,
    dynamic: bool,
    sinks: Float[Array, " heads"] | None = None,
) -> tuple[Float[Array, "T out"], Pool]:
    """See `Attention`; with `dynamic` the walk ends with the longest context, else with the table."""
    q, k, v = heads(qkv, batch, norms, shape)
    pool = write(pool, layer, batch.slots, k, v, shape.block)
    rows, (tiles, _) = batch.rows.shape[0], batch.tiles.shape
    parts = []
    if rows:
        parts.append(
            attend(q[:rows, None], pool, layer, batch.rows, batch.positions[:rows, None], shape, dynamic, sinks)
        )
    if tiles:
        tiled = q[rows:].reshape(tiles, -1, *q.shape[1:])
        positions = batch.positions[rows:].reshape(tiles, -1)
        parts.append(attend(tiled, pool, layer, batch.tiles, positions, shape, dynamic, sinks))
    return jnp.concatenate([part.reshape(-1, q.shape[1] * q.shape[2]) for part in parts]), pool


def heads(
    qkv: Float[Array, "T wide"], batch: StepBatch, norms: QKNorm | None, shape: AttentionShape
) -> tuple[Float[Array, "T heads head_dim"], Float[Array, "T kv_heads head_dim"], Float[Array, "T kv_heads head_dim"]]:
    """Queries and keys, normalised and rotated, and values."""
    split = jnp.split(qkv.reshape(qkv.shape[0], -1, shape.head_dim), (shape.heads, shape.heads + shape.kv_heads), 1)
    q, k, v = split
    if norms is not None:
        q, k = rms_norm(q, norms.q, shape.eps), rms_norm(k, norms.k, shape.eps)
    return rotate(q, batch.cos, batch.sin), rotate(k, batch.cos, batch.sin), v


def write(
    pool: Pool,
    layer: Int[Array, ""],
    slots: Int[Array, " T"],
    k: Float[Array, "T kv_heads head_dim"],
    v: Float[Array, "T kv_heads head_dim"],
    block: int,
) -> Pool:
    """Put keys and values where they belong: scatters into the flat pool, so that no layer is cut out of it."""
    layers, _, size, *row = pool.shape
    flat = pool.reshape(layers * 2 * size, *row)
    first = 2 * layer * size
    where, both = jnp.concatenate([first + slots, first + size + slots]), jnp.concatenate([k, v])
    if pool.dtype != FP8_POOL:
        return flat.at[where].set(both.astype(pool.dtype), mode="promise_in_bounds").reshape(pool.shape)
    codes, scales = quantize(both)
    flat = flat.at[where].set(codes, mode="promise_in_bounds")
    firsts = first_scales(layer, size // block, row[-1]).repeat(len(slots), total_repeat_length=2 * len(slots))
    return set_scales(flat, firsts, jnp.tile(slots, 2), scales, block).reshape(pool.shape)


def attend(
    q: Float[Array, "N Q heads head_dim"],
    pool: Pool,
    layer: Int[Array, ""],
    tables: Int[Array, "N W"],
    positions: Int[Array, "N Q"],
    shape: AttentionShape,
    dynamic: bool,
    sinks: Float[Array, " heads"] | None = None,
) -> Float[Array, "N Q heads head_dim"]:
    """Softmax(q k^T scale) v over what each token may see: its own sequence up to itself; nothing gives zeros.

    A sink adds e to its power to the denominator. With a window, what is before it is not seen, and the walk begins
    with the first piece that some token sees.
    """
    n, queries, _, width = q.shape
    walk = max(1, min(WALK // shape.block, tables.shape[1]))
    tables = jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % walk)))
    grouped = q.reshape(n, queries, shape.kv_heads, -1, width)
    chunks = tables.shape[1] // walk
    if dynamic:
        chunks = jnp.max(positions) // (walk * shape.block) + 1
    first = 0 if shape.window is None else _first(positions, shape.window) // (walk * shape.block)
    zeros = jnp.zeros((n, shape.kv_heads, grouped.shape[3], queries), jnp.float32)
    largest, total = zeros - jnp.inf, zeros
    if sinks is not None:  # a first score, of which e to the power of its distance from the maximum, itself, is 1
        own = sinks.astype(jnp.float32).reshape(shape.kv_heads, -1)
        largest, total = jnp.broadcast_to(own[..., None], zeros.shape), zeros + 1
    carry = (largest, total, jnp.zeros((*zeros.shape, width), jnp.float32))

    def step(i, carry):
        blocks = lax.dynamic_slice_in_dim(tables, i * walk, walk, 1)
        places = i * walk * shape.block + jnp.arange(walk * shape.block)
        seen = places <= positions[..., None]
        if shape.window is not None:
            seen &= places > positions[..., None] - shape.window
        k, v = _gather(pool, layer, blocks, shape.block, q.dtype)
        return _softmax_step(carry, grouped, k, v, seen, shape)

    _, total, weighted = lax.fori_loop(first, chunks, step, carry) if dynamic or chunks > 1 else step(0, carry)
    out = weighted / jnp.where(total == 0, 1, total)[..., None]
    return out.transpose(0, 3, 1, 2, 4).reshape(q.shape).astype(q.dtype)


def _first(positions: Int[Array, "N Q"], window: int) -> Int[Array, ""]:
    """Return the first place that some token sees; padding sees none."""
    return jnp.maximum(jnp.min(jnp.where(positions < 0, jnp.iinfo(jnp.int32).max, positions)) - window + 1, 0)


def _gather(
    pool: Pool, layer: Int[Array, ""], blocks: Int[Array, "N C"], size: int, dtype: jnp.dtype
) -> tuple[Array, Array]:
    """Keys and values of the blocks: one gather from the flat pool, since each of them costs XLA much to compile."""
    layers, _, slots, *row = pool.shape
    count = slots // size
    flat, firsts = pool.reshape(layers * 2 * count, size, *row), 2 * layer * count + np.asarray([0, count], np.int32)
    both = flat.at[firsts[:, None, None] + blocks].get(mode="promise_in_bounds")
    both = both.reshape(2, blocks.shape[0], -1, *row)
    if pool.dtype == FP8_POOL:
        firsts = first_scales(layer, count, row[-1])[:, None, None]
        both = numbers(both, get_scales(pool.reshape(-1, *row), firsts, blocks, size), dtype)
    return both[0], both[1]


def _softmax_step(carry, q, k, v, seen, shape):
    """Take one more piece of context into the running maximum, sum and weighted values."""
    largest, total, weighted = carry
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    kind = {"precision": precision, "preferred_element_type": jnp.float32}
    scores = jnp.einsum("nqkgd,nskd->nkgqs", q, k, **kind) * shape.scale
    if shape.cap is not None:
        scores = jnp.tanh(scores / shape.cap) * shape.cap
    scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
    # What nobody sees may hold anything, as what a request left in its blocks: 0 times that need not be 0.
    v = jnp.where(seen.any(1)[..., None, None], v, 0)
    peak = jnp.maximum(largest, scores.max(-1))
    # A row that has seen nothing yet has no maximum to subtract.
    base = jnp.where(jnp.isneginf(peak), 0, peak)
    shares, shrink = jnp.exp(scores - base[..., None]), jnp.exp(largest - base)
    weighted = weighted * shrink[..., None] + jnp.einsum("nkgqs,nskd->nkgqd", shares.astype(v.dtype), v, **kind)
    return peak, total * shrink + shares.sum(-1), weighted
