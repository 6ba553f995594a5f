"""Paged attention on a GPU: see `Attention`.

Rows of one token take one kernel, or two on GPUs without clusters of thread blocks; tiles of prompts take two.
"""

import itertools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from fullstride.llm.kernels.cuda.launch import Kernel, call
from fullstride.llm.kernels.cuda.target import HOPPER, Target
from fullstride.llm.kernels.fp8_pool import SCALE_BYTES, token_blocks
from fullstride.llm.kernels.interface import FP8_POOL, AttentionShape, QKNorm, StepBatch

Pool = Num[Array, "layers 2 slots kv_heads head_dim"]
HEAD_DIMS = (64, 96, 128, 256)
MOST_SHARE = 16  # query heads of one key head
# Of the decode kernel: warps; tiles that a warp gets before another block is worth it, and of its ring, with bf16 and
# with codes of a byte, so that about as many bytes are under way; tokens of a tile.
WARPS, LEAST, STAGES, CODES_STAGES, TILE = 4, 3, 3, 5, 16
# Pairs of a row and a key head from which on one block for each keeps the GPU busy; and blocks of a pair below that, at
# most, in a cluster and without one.
MANY_PAIRS, CLUSTER, PARTS = 256, 2, 8
# Of the prefill kernel: warps of a block, tokens of a step, by whether a head has more elements than registers hold.
PREFILL_WARPS, SPANS, REGISTERS_HOLD = 4, (64, 32), 128
HEADS_WARPS = 8


class DecodeForm(NamedTuple):
    """Division of the decode kernel.

    Attributes:
        warps: of a block.
        parts: blocks of a row and a key head.
        cluster: blocks of a cluster: `parts`, or 1 if they leave their parts in global memory.
        stages: tiles of a warp's ring.
        shared: bytes of a block's shared memory.

    """

    warps: int
    parts: int
    cluster: int
    stages: int
    shared: int


def refusal(heads: int, kv_heads: int, head_dim: int, block: int, dtype: str) -> str | None:
    """Return why these kernels do not support a model, or None if they do."""
    if dtype != "bfloat16":
        return f"dtype {dtype}: expected bfloat16"
    if head_dim not in HEAD_DIMS:
        return f"head_dim {head_dim}: expected one of {HEAD_DIMS}"
    if heads // kv_heads > MOST_SHARE:
        return f"{heads // kv_heads} query heads per key head: expected at most {MOST_SHARE}"
    if block % 8:
        return f"blocks of {block} tokens: expected a multiple of 8"
    return None


def attention(
    qkv: Float[Array, "T wide"],
    pool: Pool,
    layer: Int[Array, ""],
    batch: StepBatch,
    norms: QKNorm | None,
    shape: AttentionShape,
    *,
    sinks: Float[Array, " heads"] | None = None,
    target: Target = HOPPER,
) -> tuple[Float[Array, "T out"], Pool]:
    """See `Attention`.

    Raises:
        ValueError: for sizes or a dtype that it was not made for.

    """
    reason = refusal(shape.heads, shape.kv_heads, shape.head_dim, shape.block, str(qkv.dtype))
    if reason:
        raise ValueError(f"the CUDA kernels do not support {reason}; set kernels=plain")
    rows, (tiles, _) = batch.rows.shape[0], batch.tiles.shape
    # What a model does without is not looked at.
    nothing = jnp.zeros(0, qkv.dtype)
    weights = norms or QKNorm(nothing, nothing)
    own = nothing if sinks is None else sinks.astype(qkv.dtype)
    sizes = _sizes(pool.shape[2], shape, norms is not None, pool.dtype == FP8_POOL, sinks is not None, target)
    parts, queries = [], None
    if tiles:
        queries, pool = _chunk_heads(qkv, pool, layer, batch, weights, shape, sizes, target)
    if rows:
        out, pool = _decode(qkv, pool, layer, batch, weights, own, shape, sizes, target)
        parts.append(out)
    if queries is not None:
        parts.append(_prefill(queries, pool, layer, batch, own, shape, sizes, target))
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts), pool


def _sizes(
    slots: int, shape: AttentionShape, norms: bool, fp8: bool, sinks: bool, target: Target
) -> dict[str, int | float]:
    coded = token_blocks(slots // shape.block, FP8_POOL, shape.head_dim)
    return {
        "HEADS": shape.heads,
        "KV_HEADS": shape.kv_heads,
        "HEAD_DIM": shape.head_dim,
        "BLOCK": shape.block,
        "SLOTS": slots,
        "CODED": coded * shape.block,
        "SCALE": shape.scale * math.log2(math.e),
        "EPS": shape.eps,
        "NORMS": int(norms),
        "FP8": int(fp8),
        "CONVERTS": int(target.architecture != "80"),
        "WINDOW": shape.window or 0,
        "CAP": shape.cap or 0.0,
        "SINKS": int(sinks),
    }


def _kernel(
    files: tuple[str, ...], sizes: dict[str, int | float], warps: int, shared: int, target: Target, **more: int
) -> Kernel:
    """Return the kernel that has the name of the last of its files."""
    name = files[-1].removesuffix(".cu")
    return Kernel(name, files, tuple({**sizes, **more, "WARPS": warps}.items()), 32 * warps, shared, target)


def decode_kernel(
    rows: int, table: int, slots: int, shape: AttentionShape, norms: bool, arranged: int = 0, fp8: bool = False
) -> tuple[Kernel, tuple[int, int, int]]:
    """Return a Hopper GPU's kernel for rows of one token each, and its grid.

    Its parameters: qkv, pool, layer, positions, slots, tables, cos, sin, weights of both norms, sinks; out, pool.

    Args:
        rows: rows of the batch.
        table: entries of a row's block table.
        slots: slots of a layer's keys in the KV cache, those that have scales among them.
        shape: sizes of the model's attention.
        norms: whether queries and keys are normalized.
        arranged: times 64 rows, of which these are the first, that the result has in the order of `rows.cuh`, as the
            next kernel of a chain wants them; 0 for its own rows, one after the other.
        fp8: whether the KV cache has the dtype `FP8_POOL`.

    """
    sizes = _sizes(slots, shape, norms, fp8, False, HOPPER)
    found = form(rows * shape.kv_heads, shape, fp8, HOPPER)
    return _decode_kernel(rows, table, shape, sizes, found, HOPPER, arranged)


def _decode_kernel(
    rows: int,
    table: int,
    shape: AttentionShape,
    sizes: dict[str, int | float],
    form: DecodeForm,
    target: Target,
    arranged: int = 0,
) -> tuple[Kernel, tuple[int, int, int]]:
    files = ("rows.cuh", "heads.cuh", "parts.cuh", "decode_attention.cu")
    more = {"PARTS": form.parts, "CLUSTER": form.cluster, "LEAST": LEAST, "STAGES": form.stages, "TABLE": table}
    more |= {"SLABS": arranged, "CHAINED": int(arranged > 0)}
    made = _kernel(files, sizes, form.warps, form.shared, target, **more)
    return made, (form.parts * shape.kv_heads, rows, 1)


def form(pairs: int, shape: AttentionShape, fp8: bool, target: Target) -> DecodeForm:
    """Return the division for so many pairs of a row and a key head: a Hopper GPU's as measured, or less of it."""
    group, blocks = shape.heads // shape.kv_heads, [(1, 1)]
    if pairs < MANY_PAIRS:
        blocks = [(CLUSTER, CLUSTER)] * target.clusters + [(PARTS, 1)]
    queries = (group + 2) * (shape.head_dim + 8) * 2
    most, size = (CODES_STAGES, 1) if fp8 else (STAGES, 2)
    # A ring also takes its warp's sums.
    least = 2 * TILE * (shape.head_dim * size + SCALE_BYTES * fp8)
    stages = range(most, max(2, -(-group * (shape.head_dim + 4) * 4 // least)) - 1, -1)
    forms = []
    for (parts, cluster), warps, count in itertools.product(blocks, (WARPS, WARPS // 2), stages):
        sent = (cluster - 1) * group * shape.head_dim // 2 * 16
        shared = warps * count * least + queries + sent + 16 + (group + 2 * fp8) * 4
        forms.append(DecodeForm(warps, parts, cluster, count, shared))
    return next(form for form in forms if form.shared <= target.shared)


def _decode(
    qkv: Array,
    pool: Pool,
    layer: Array,
    batch: StepBatch,
    norms: QKNorm,
    sinks: Array,
    shape: AttentionShape,
    sizes: dict[str, int | float],
    target: Target,
) -> tuple[Float[Array, "D out"], Pool]:
    rows, table = batch.rows.shape
    found = form(rows * shape.kv_heads, shape, pool.dtype == FP8_POOL, target)
    out = jax.ShapeDtypeStruct((rows, shape.heads * shape.head_dim), qkv.dtype)
    # Of two elements of a head: their sums, the peak and the total.
    pairs = (rows, shape.kv_heads, found.parts, shape.heads // shape.kv_heads * shape.head_dim // 2, 4)
    apart = found.cluster < found.parts
    left, pool = call(
        *_decode_kernel(rows, table, shape, sizes, found, target),
        (qkv, pool, layer, batch.positions, batch.slots, batch.rows, batch.cos, batch.sin, *norms, sinks),
        (jax.ShapeDtypeStruct(pairs, jnp.float32) if apart else out, jax.ShapeDtypeStruct(pool.shape, pool.dtype)),
        {1: 1},
    )
    if not apart:
        return left, pool
    files = ("heads.cuh", "parts.cuh", "decode_sums.cu")
    sums = _kernel(files, sizes, found.warps, 0, target, PARTS=found.parts, LEAST=LEAST)
    (total,) = call(sums, (shape.kv_heads, rows, 1), (batch.positions, left), (out,))
    return total, pool


def _chunk_heads(
    qkv: Array,
    pool: Pool,
    layer: Array,
    batch: StepBatch,
    norms: QKNorm,
    shape: AttentionShape,
    sizes: dict[str, int | float],
    target: Target,
) -> tuple[Float[Array, "C heads head_dim"], Pool]:
    rows, tokens = batch.rows.shape[0], qkv.shape[0]
    heads = -(-(shape.heads + 2 * shape.kv_heads) // HEADS_WARPS)
    queries, pool = call(
        _kernel(("heads.cuh", "chunk_heads.cu"), sizes, HEADS_WARPS, 0, target, FIRST=rows),
        (heads, tokens - rows, 1),
        (qkv, pool, layer, batch.positions, batch.slots, batch.cos, batch.sin, *norms),
        (
            jax.ShapeDtypeStruct((tokens - rows, shape.heads, shape.head_dim), qkv.dtype),
            jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        ),
        {1: 1},
    )
    return queries, pool


def _prefill(
    queries: Array,
    pool: Pool,
    layer: Array,
    batch: StepBatch,
    sinks: Array,
    shape: AttentionShape,
    sizes: dict[str, int | float],
    target: Target,
) -> Float[Array, "C out"]:
    (tiles, table), rows = batch.tiles.shape, batch.rows.shape[0]
    tokens = queries.shape[0] // tiles
    blocks = -(-tokens * (shape.heads // shape.kv_heads) // (16 * PREFILL_WARPS))
    span = SPANS[shape.head_dim > REGISTERS_HOLD]
    # Two stages of keys and values, with 16 bytes behind each row, and scales.
    row = shape.head_dim * pool.dtype.itemsize + 16 + SCALE_BYTES * (pool.dtype == FP8_POOL)
    shared = 4 * span * row + 8 * PREFILL_WARPS
    more = {"SPAN": span, "FIRST": rows, "TOKENS": tokens, "TABLE": table}
    (out,) = call(
        _kernel(("heads.cuh", "prefill_attention.cu"), sizes, PREFILL_WARPS, shared, target, **more),
        (blocks, shape.kv_heads, tiles),
        (queries, pool, layer, batch.positions, batch.tiles, sinks),
        (jax.ShapeDtypeStruct((queries.shape[0], shape.heads * shape.head_dim), queries.dtype),),
    )
    return out
