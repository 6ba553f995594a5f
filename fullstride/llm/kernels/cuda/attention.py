"""Paged attention on a Hopper GPU: see `Attention`; one kernel for rows of one token, two for tiles of prompts."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from fullstride.llm.kernels.cuda.launch import Kernel, call
from fullstride.llm.kernels.interface import FP8_POOL, AttentionShape, QKNorm, StepBatch

Pool = Num[Array, "layers 2 slots kv_heads head_dim"]
HEAD_DIMS = (64, 128)
MOST_SHARE = 16  # query heads of one key head
# Of the decode kernel: tiles that a warp gets before another block is worth it, and of its ring, with bf16 and with
# codes of a byte, so that about as many bytes are under way; tokens of a tile.
LEAST, STAGES, CODES_STAGES, TILE = 3, 3, 5, 16
# Of the prefill kernel: warps of a block, tokens of a step.
PREFILL_WARPS, SPAN = 4, 64
HEADS_WARPS = 8


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
) -> tuple[Float[Array, "T out"], Pool]:
    """See `Attention`.

    Raises:
        ValueError: for sizes or a dtype that it was not made for.

    """
    reason = refusal(shape.heads, shape.kv_heads, shape.head_dim, shape.block, str(qkv.dtype))
    reason = "attention sinks" if sinks is not None else reason
    if reason:
        raise ValueError(f"the CUDA kernels do not support {reason}; set kernels=plain")
    rows, (tiles, _) = batch.rows.shape[0], batch.tiles.shape
    # A model without such norms has no weights for the kernels to leave alone.
    weights = norms or QKNorm(jnp.zeros(0, qkv.dtype), jnp.zeros(0, qkv.dtype))
    sizes = _sizes(pool.shape[2], shape, norms is not None, pool.dtype == FP8_POOL)
    parts, queries = [], None
    if tiles:
        queries, pool = _chunk_heads(qkv, pool, layer, batch, weights, shape, sizes)
    if rows:
        out, pool = _decode(qkv, pool, layer, batch, weights, shape, norms is not None)
        parts.append(out)
    if queries is not None:
        parts.append(_prefill(queries, pool, layer, batch, shape, sizes))
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts), pool


def _sizes(slots: int, shape: AttentionShape, norms: bool, fp8: bool) -> dict[str, int | float]:
    return {
        "HEADS": shape.heads,
        "KV_HEADS": shape.kv_heads,
        "HEAD_DIM": shape.head_dim,
        "BLOCK": shape.block,
        "SLOTS": slots,
        "SCALE": shape.scale * math.log2(math.e),
        "EPS": shape.eps,
        "NORMS": int(norms),
        "FP8": int(fp8),
    }


def _kernel(name: str, sizes: dict[str, int | float], warps: int, shared: int, **more: int) -> Kernel:
    return Kernel(name, ("heads.cuh", f"{name}.cu"), tuple({**sizes, **more}.items()), 32 * warps, shared)


def decode_kernel(
    rows: int, table: int, slots: int, shape: AttentionShape, norms: bool, arranged: int = 0, fp8: bool = False
) -> tuple[Kernel, tuple[int, int, int]]:
    """Return the kernel for rows of one token each, and its grid.

    Its parameters: qkv, pool, layer, positions, slots, tables, cos, sin, weights of both norms; out, pool.

    Args:
        rows: rows of the batch.
        table: entries of a row's block table.
        slots: token slots of the KV cache.
        shape: sizes of the model's attention.
        norms: whether queries and keys are normalized.
        arranged: times 64 rows, of which these are the first, that the result has in the order of `rows.cuh`, as the
            next kernel of a chain wants them; 0 for its own rows, one after the other.
        fp8: whether the KV cache has the dtype `FP8_POOL`.

    """
    group, (warps, cluster) = shape.heads // shape.kv_heads, form(rows * shape.kv_heads)
    queries = (group + 2) * (shape.head_dim + 8) * 2
    sent = (cluster - 1) * group * shape.head_dim // 2 * 16
    stages, size = (CODES_STAGES, 1) if fp8 else (STAGES, 2)
    shared = warps * stages * 2 * TILE * shape.head_dim * size + queries + sent + 16 + group * 4
    more = {"WARPS": warps, "CLUSTER": cluster, "LEAST": LEAST, "STAGES": stages, "TABLE": table}
    more |= {"SLABS": arranged, "CHAINED": int(arranged > 0)}
    made = _kernel("decode_attention", _sizes(slots, shape, norms, fp8), warps, shared, **more)
    made = replace(made, files=("rows.cuh", *made.files))
    return made, (cluster * shape.kv_heads, rows, 1)


def form(pairs: int) -> tuple[int, int]:
    """Warps of a block and blocks of a cluster for so many pairs of a row and a key head, as measured on an H200."""
    return (4, 1) if pairs >= 256 else (4, 2)


def _decode(
    qkv: Array, pool: Pool, layer: Array, batch: StepBatch, norms: QKNorm, shape: AttentionShape, normed: bool
) -> tuple[Float[Array, "D out"], Pool]:
    rows, table = batch.rows.shape
    out, pool = call(
        *decode_kernel(rows, table, pool.shape[2], shape, normed, fp8=pool.dtype == FP8_POOL),
        (qkv, pool, layer, batch.positions, batch.slots, batch.rows, batch.cos, batch.sin, *norms),
        (
            jax.ShapeDtypeStruct((rows, shape.heads * shape.head_dim), qkv.dtype),
            jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        ),
        {1: 1},
    )
    return out, pool


def _chunk_heads(
    qkv: Array,
    pool: Pool,
    layer: Array,
    batch: StepBatch,
    norms: QKNorm,
    shape: AttentionShape,
    sizes: dict[str, int | float],
) -> tuple[Float[Array, "C heads head_dim"], Pool]:
    rows, tokens = batch.rows.shape[0], qkv.shape[0]
    heads = -(-(shape.heads + 2 * shape.kv_heads) // HEADS_WARPS)
    queries, pool = call(
        _kernel("chunk_heads", sizes, HEADS_WARPS, 0, WARPS=HEADS_WARPS, FIRST=rows),
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
    queries: Array, pool: Pool, layer: Array, batch: StepBatch, shape: AttentionShape, sizes: dict[str, int | float]
) -> Float[Array, "C out"]:
    (tiles, table), rows = batch.tiles.shape, batch.rows.shape[0]
    tokens = queries.shape[0] // tiles
    blocks = -(-tokens * (shape.heads // shape.kv_heads) // (16 * PREFILL_WARPS))
    # Two stages of keys and values, with 16 bytes behind each row.
    shared = 4 * SPAN * (shape.head_dim * pool.dtype.itemsize + 16) + 4 * PREFILL_WARPS
    more = {"WARPS": PREFILL_WARPS, "SPAN": SPAN, "FIRST": rows, "TOKENS": tokens, "TABLE": table}
    (out,) = call(
        _kernel("prefill_attention", sizes, PREFILL_WARPS, shared, **more),
        (blocks, shape.kv_heads, tiles),
        (queries, pool, layer, batch.positions, batch.tiles),
        (jax.ShapeDtypeStruct((queries.shape[0], shape.heads * shape.head_dim), queries.dtype),),
    )
    return out
