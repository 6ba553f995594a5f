"""Work of `benchmarks paged-attention`: rows of a decode step, expected results, and peers.

Without a kernel, XLA gathers; JAX's own paged attention is a Pallas kernel for GPUs.
"""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from fullstride.llm.kernels.interface import FP8_POOL, AttentionShape, QKNorm, StepBatch
from fullstride.llm.kernels.xla.attention import Pool, heads, write

MODULE = "jax.experimental.pallas.ops.gpu.paged_attention"
# Parts of a row's context that are read at the same time, its usual number and fewer: the batch decides what is faster.
SPLITS = (16, 4)
# Keys that a part multiplies at once: its usual eight pages of sixteen tokens.
KEYS = 128
# Keys and values of each layer with heads first, as the kernel expects them.
Pages = tuple[tuple[Float[Array, "kv_heads pages block head_dim"], Float[Array, "kv_heads pages block head_dim"]], ...]


class PagedAttentionCase(NamedTuple):
    """Inputs of a decode step: one token per row."""

    qkv: Float[Array, "D wide"]
    batch: StepBatch
    contexts: np.ndarray  # tokens that each row sees, this one among them


def _itself(pool: Any) -> Any:
    return pool


class Way(NamedTuple):
    """Implementation of the attention."""

    call: Callable[..., Any]  # of one layer, or of all of them
    whole: bool = False  # of all
    keep: bool = False  # XLA would leave out a call whose result nobody reads
    layer: Callable[[int], Any] = jnp.int32  # how it is told the layer
    inside: Callable[[Any], Any] = _itself  # from the pool to its layout of it
    outside: Callable[[Any], Any] = _itself  # and back
    another: bool = False  # not of this project; where it breaks, the others are measured all the same
    fp8: bool = False  # from a rounded copy of the pool


def slots(shape: AttentionShape, rows: int, longest: int) -> int:
    """Return the number of slots of a KV cache with `rows` contexts of up to `longest` tokens each."""
    return (rows * -(-longest // shape.block) + 1) * shape.block


def draw(
    rng: np.random.Generator, shape: AttentionShape, rows: int, low: int, high: int, dtype: str
) -> PagedAttentionCase:
    """Draw contexts from `low` to `high` tokens, with blocks anywhere in the KV cache."""
    contexts, width = rng.integers(low, high + 1, rows), -(-high // shape.block)
    tables = 1 + rng.permutation(rows * width).reshape(rows, width)
    last = contexts - 1
    places = tables[np.arange(rows), last // shape.block] * shape.block + last % shape.block
    angles = rng.uniform(0, 6, (rows, shape.head_dim // 2))
    integers = (last, last, places, tables, np.zeros((0, width)))
    tokens, positions, slots_, rows_, tiles = (jnp.asarray(x, jnp.int32) for x in integers)
    cos, sin = (jnp.asarray(turn(angles), jnp.float32) for turn in (np.cos, np.sin))
    wide = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    qkv = jnp.asarray(rng.standard_normal((rows, wide)), dtype)
    return PagedAttentionCase(qkv, StepBatch(tokens, positions, slots_, rows_, tiles, cos, sin), contexts)


def gather(
    qkv: Float[Array, "D wide"],
    pool: Pool,
    layer: Int[Array, ""],
    batch: StepBatch,
    norms: QKNorm | None,
    shape: AttentionShape,
) -> tuple[Float[Array, "D out"], Pool]:
    """Compute attention without a kernel: gather all blocks of the tables, then one softmax."""
    q, k, v = heads(qkv, batch, norms, shape)
    pool = write(pool, layer, batch.slots, k, v, shape.block)
    rows, width = batch.rows.shape
    # Out of the flat pool: a layer cut out of it first would be copied, which takes longer than all the rest.
    blocks = pool.reshape(-1, shape.block, shape.kv_heads, shape.head_dim)
    count = pool.shape[2] // shape.block
    tables = 2 * layer * count + jnp.stack([batch.rows, count + batch.rows])
    keys, values = blocks[tables].reshape(2, rows, width * shape.block, shape.kv_heads, shape.head_dim)
    grouped = q.reshape(rows, shape.kv_heads, -1, shape.head_dim)
    scores = jnp.einsum("nkgd,nskd->nkgs", grouped, keys, preferred_element_type=jnp.float32) * shape.scale
    seen = jnp.arange(width * shape.block) <= batch.positions[:, None]
    shares = jax.nn.softmax(jnp.where(seen[:, None, None], scores, -jnp.inf), axis=-1)
    out = jnp.einsum("nkgs,nskd->nkgd", shares.astype(values.dtype), values, preferred_element_type=jnp.float32)
    return out.reshape(rows, -1).astype(qkv.dtype), pool


def chained(
    qkv: Float[Array, "D wide"], pool: Pool, batch: StepBatch, norms: QKNorm, shape: AttentionShape
) -> tuple[Float[Array, "D out"], Pool]:
    """Run the CUDA kernel on all layers in one chain; return the last layer's results."""
    from fullstride.llm.kernels.cuda.attention import decode_kernel
    from fullstride.llm.kernels.cuda.chain import ChainLaunch, chain
    from fullstride.llm.kernels.cuda.product import in_order, slabs

    (rows, width), layers = batch.rows.shape, pool.shape[0]
    kernel = decode_kernel(rows, width, pool.shape[2], shape, True, slabs(rows), pool.dtype == FP8_POOL)
    operands = [qkv, pool, jnp.arange(layers, dtype=jnp.int32), batch.positions, batch.slots, batch.rows]
    operands += [batch.cos, batch.sin, *norms, jnp.zeros(8, qkv.dtype)]
    out = jax.ShapeDtypeStruct((slabs(rows) * 64, shape.heads * shape.head_dim), qkv.dtype)
    places = [(i, 0) for i in range(len(operands))]

    def link(layer: int) -> ChainLaunch:
        given = [*places[:2], (2, 4 * layer), *places[3:]]
        return ChainLaunch(*kernel, (*given, (len(operands), 0), (len(operands) + 1, 0)))

    results = (out, jax.ShapeDtypeStruct(pool.shape, pool.dtype))
    found, pool = chain([link(layer) for layer in range(layers)], operands, results, {1: 1})
    return in_order(found, rows), pool


def expected(
    case: PagedAttentionCase, pool: Pool, layer: int, norms: QKNorm, shape: AttentionShape, rows: list[int]
) -> np.ndarray:
    """Return some rows' results in fp64, from a KV cache that has this step's keys and values."""
    q, _, _ = heads(case.qkv, case.batch, norms, shape)
    found = []
    for row in rows:
        at = np.arange(case.contexts[row])
        table = np.asarray(case.batch.rows[row])
        own = pool[layer, :, table[at // shape.block] * shape.block + at % shape.block]
        keys, values = np.moveaxis(np.asarray(own, np.float64), 1, 0)
        query = np.asarray(q[row], np.float64).reshape(shape.kv_heads, -1, shape.head_dim)
        scores = np.einsum("kgd,skd->kgs", query, keys) * shape.scale
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        found.append(np.einsum("kgs,skd->kgd", shares, values).reshape(-1))
    return np.array(found)


def present() -> bool:
    """Return whether the installed version of JAX has this kernel."""
    return find_spec(MODULE) is not None


def ways(shape: AttentionShape, **options: Any) -> dict[str, Way]:
    """Return the kernel by name."""
    return {
        f"JAX's Pallas, {splits} splits": Way(
            partial(attention, splits=splits, **options),
            keep=True,
            layer=int,
            inside=partial(pages, shape=shape),
            outside=partial(pool_of, shape=shape),
            another=True,
        )
        for splits in SPLITS
    }


@partial(jax.jit, static_argnames="shape")
def pages(pool: Pool, shape: AttentionShape) -> Pages:
    """Return the KV cache in the layout of the kernel."""
    blocks = pool.reshape(*pool.shape[:2], -1, shape.block, shape.kv_heads, shape.head_dim)
    outside = jnp.moveaxis(blocks, 4, 2)
    return tuple((layer[0], layer[1]) for layer in outside)


@partial(jax.jit, static_argnames="shape")
def pool_of(found: Pages, shape: AttentionShape) -> Pool:
    """Convert the pages back into the KV cache."""
    blocks = jnp.moveaxis(jnp.stack([jnp.stack(layer) for layer in found]), 2, 4)
    return blocks.reshape(*blocks.shape[:2], -1, shape.kv_heads, shape.head_dim)


def attention(
    qkv: Float[Array, "D wide"],
    pool: Pages,
    layer: int,
    batch: StepBatch,
    norms: QKNorm | None,
    shape: AttentionShape,
    *,
    splits: int,
    interpret: bool = False,
) -> tuple[Float[Array, "D out"], Pages]:
    """Compute a decode step's attention on one layer; XLA writes keys and values first."""
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    q, k, v = heads(qkv, batch, norms, shape)
    at = (slice(None), batch.slots // shape.block, batch.slots % shape.block)
    keys, values = (x.at[at].set(new.swapaxes(0, 1)) for x, new in zip(pool[layer], (k, v), strict=True))
    width = batch.rows.shape[1]
    splits = _divisor(width, splits)
    out = paged_attention(
        q * jnp.asarray(shape.scale, q.dtype),  # it has no scale of its own
        *(keys, values, batch.rows, batch.positions + 1),
        k_splits=splits,
        pages_per_compute_block=_divisor(width // splits, max(1, KEYS // shape.block)),
        interpret=interpret,
    )
    return out.reshape(len(qkv), -1), (*pool[:layer], (keys, values), *pool[layer + 1 :])


def _divisor(number: int, most: int) -> int:
    """Return the largest divisor of a number up to a limit."""
    return max(d for d in range(1, min(number, most) + 1) if number % d == 0)
