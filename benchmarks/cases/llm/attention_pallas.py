"""JAX's own paged attention, a Pallas kernel for GPUs, to stand beside in `python -m benchmarks paged-attention`."""

from functools import partial
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from benchmarks.cases.llm.attention_work import Way
from fullstride.llm.kernels import Batch, QKNorm, Shape
from fullstride.llm.kernels.xla.attention import Pool, heads

MODULE = "jax.experimental.pallas.ops.gpu.paged_attention"
# Parts of a row's context that are read at the same time, its usual number and fewer: the batch decides what is faster.
SPLITS = (16, 4)
# Keys that a part multiplies at once: its usual eight pages of sixteen tokens.
KEYS = 128
# Of each layer keys and values, with heads outside, as it wants them.
Pages = tuple[tuple[Float[Array, "kv_heads pages block head_dim"], Float[Array, "kv_heads pages block head_dim"]], ...]


def present() -> bool:
    """Whether this version of JAX has it."""
    return find_spec(MODULE) is not None


def ways(shape: Shape, **options: Any) -> dict[str, Way]:
    """It, by name."""
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
def pages(pool: Pool, shape: Shape) -> Pages:
    """The pool in its layout."""
    blocks = pool.reshape(*pool.shape[:2], -1, shape.block, shape.kv_heads, shape.head_dim)
    outside = jnp.moveaxis(blocks, 4, 2)
    return tuple((layer[0], layer[1]) for layer in outside)


@partial(jax.jit, static_argnames="shape")
def pool_of(found: Pages, shape: Shape) -> Pool:
    """The pool again."""
    blocks = jnp.moveaxis(jnp.stack([jnp.stack(layer) for layer in found]), 2, 4)
    return blocks.reshape(*blocks.shape[:2], -1, shape.kv_heads, shape.head_dim)


def attention(
    qkv: Float[Array, "D wide"],
    pool: Pages,
    layer: int,
    batch: Batch,
    norms: QKNorm | None,
    shape: Shape,
    *,
    splits: int,
    interpret: bool = False,
) -> tuple[Float[Array, "D out"], Pages]:
    """A decode step's attention on one layer; keys and values are written by XLA before."""
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
    """The largest divisor of a number that is no more than so many."""
    return max(d for d in range(1, min(number, most) + 1) if number % d == 0)
