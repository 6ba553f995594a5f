"""KV caches of `benchmarks paged-attention --dtype fp8`: from the one in bfloat16 to codes with scales, and back."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, UInt8

from fullstride.llm.kernels.fp8_pool import (
    first_scales,
    get_scales,
    numbers,
    quantize,
    set_scales,
    token_blocks,
    whole_blocks,
)
from fullstride.llm.kernels.interface import FP8_POOL


@partial(jax.jit, static_argnames="block")
def to_fp8(
    pool: Float[Array, "layers 2 slots kv_heads head_dim"], *, block: int
) -> UInt8[Array, "layers 2 more kv_heads head_dim"]:
    """Return an fp8 KV cache, made layer by layer, since its numbers in fp32 take more room than all codes."""
    _, _, size, _, head_dim = pool.shape
    more = whole_blocks(size // block, FP8_POOL, head_dim) * block - size
    slots = jnp.arange(size)

    def made(layer: Array) -> Array:
        codes, scales = quantize(layer)
        codes = jnp.pad(codes, ((0, 0), (0, more), (0, 0), (0, 0)))
        flat = codes.reshape(-1, *codes.shape[2:])
        firsts = first_scales(0, codes.shape[1] // block, head_dim).repeat(size)
        return set_scales(flat, firsts, jnp.tile(slots, 2), scales.reshape(2 * size, -1), block).reshape(codes.shape)

    return lax.map(made, pool)


@partial(jax.jit, static_argnames="block")
def from_fp8(
    pool: UInt8[Array, "layers 2 more kv_heads head_dim"], *, block: int
) -> Float[Array, "layers 2 slots kv_heads head_dim"]:
    """Return the numbers of an fp8 KV cache in bfloat16."""
    whole, head_dim = pool.shape[2] // block, pool.shape[-1]
    blocks = token_blocks(whole, FP8_POOL, head_dim)

    def numbers_of(layer: Array) -> Array:
        flat, every = layer.reshape(-1, *layer.shape[2:]), jnp.arange(blocks)[None]
        scales = get_scales(flat, first_scales(0, whole, head_dim)[:, None, None], every, block)[:, 0]
        return numbers(layer[:, : blocks * block], scales, jnp.dtype("bfloat16"))

    return lax.map(numbers_of, pool)
