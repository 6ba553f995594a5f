"""KV cache of e4m3 codes (arXiv:2209.05433) with a scale for each token and key head, of its key and of its value.

The largest element of a head becomes the largest code, so a model needs no calibration, and what is stored of a token
never depends on another one. As an array such a KV cache has more blocks than it has for tokens: behind the codes of
a layer's keys, and of its values, come the scales in the order (blocks, key heads, tokens of a block).
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, BFloat16, Float, Int, UInt8

from fullstride.llm.kernels.interface import FP8_POOL

# Largest number of e4m3.
MOST = 448.0
# Bytes of a scale; and those that there are, the least of which is that of zeros. The largest holds whatever float16
# does; beyond it numbers are clipped.
SCALE_BYTES, SCALES = 2, (2.0**-100, 255.0)
# Of scales as they are stored. A code's bits, read as bf16, are its number times 2^-120.
STORED = 2.0**120


def whole_blocks(blocks: int, pool: str, head_dim: int) -> int:
    """Return the blocks of an array that has so many for tokens, given the dtype of the KV cache."""
    return blocks + (-(-blocks * SCALE_BYTES // head_dim) if pool == FP8_POOL else 0)


def token_blocks(whole: int, pool: str, head_dim: int) -> int:
    """Return how many of an array's blocks are for tokens."""
    return whole * head_dim // (head_dim + SCALE_BYTES) if pool == FP8_POOL else whole


def first_scales(layer: Int[Array, ""] | int, blocks: int, head_dim: int) -> Int[Array, "2"]:
    """Return the first blocks of scales of a layer's keys and of its values, each an array of so many blocks."""
    return jnp.asarray(
        2 * layer * blocks + np.asarray([0, blocks], np.int32) + token_blocks(blocks, FP8_POOL, head_dim)
    )


def quantize(
    x: Float[Array, "*tokens head_dim"],
) -> tuple[UInt8[Array, "*tokens head_dim"], BFloat16[Array, "*tokens"]]:
    """Return keys or values as codes, and their scales as they are stored; numbers that are none stay none."""
    wide = x.astype(jnp.float32)
    scales = jnp.clip(jnp.abs(wide).max(-1) * np.float32(1 / MOST), *SCALES).astype(jnp.bfloat16)
    inverse = 1 / scales.astype(jnp.float32)
    codes = jnp.clip(wide * inverse[..., None], -MOST, MOST).astype(jnp.float8_e4m3fn)
    return lax.bitcast_convert_type(codes, jnp.uint8), scales * jnp.bfloat16(STORED)


def numbers(
    codes: UInt8[Array, "*tokens head_dim"], stored: BFloat16[Array, "*tokens"], dtype: jnp.dtype
) -> Float[Array, "*tokens head_dim"]:
    """Return the numbers of codes and scales."""
    scales = stored.astype(jnp.float32) * np.float32(1 / STORED)
    wide = lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)
    return (wide * scales[..., None]).astype(dtype)


def set_scales(
    flat: UInt8[Array, "rows kv_heads head_dim"],
    firsts: Int[Array, " T"],
    slots: Int[Array, " T"],
    stored: BFloat16[Array, "T kv_heads"],
    block: int,
) -> UInt8[Array, "rows kv_heads head_dim"]:
    """Set the scales of slots.

    Args:
        flat: the KV cache's slots, layer by layer, keys and then values.
        firsts: of each slot the first block of scales of its layer's keys or values.
        slots: in that layer.
        stored: scales of `quantize`.
        block: tokens of a block.

    """
    view, each = _scales(flat, block)
    at, place = slots // block, slots % block
    return (
        view.at[firsts + at // each, at % each, :, place]
        .set(lax.bitcast_convert_type(stored, jnp.uint8), mode="promise_in_bounds")
        .reshape(flat.shape)
    )


def get_scales(
    flat: UInt8[Array, "rows kv_heads head_dim"], firsts: Int[Array, "2 1 1"], blocks: Int[Array, "N C"], block: int
) -> BFloat16[Array, "2 N tokens kv_heads"]:
    """Return the scales of blocks of keys and values, whose first blocks of scales are `firsts`; see `set_scales`."""
    view, each = _scales(flat, block)
    found = view.at[firsts + blocks // each, blocks % each].get(mode="promise_in_bounds")
    scales = lax.bitcast_convert_type(found, jnp.bfloat16)
    return scales.swapaxes(-1, -2).reshape(2, len(blocks), -1, flat.shape[1])


def _scales(flat: UInt8[Array, "rows kv_heads head_dim"], block: int) -> tuple[Array, int]:
    """Return the array as its blocks of scales, and how many blocks of tokens each has those of."""
    rows, kv_heads, head_dim = flat.shape
    each = head_dim // SCALE_BYTES
    return flat.reshape(rows // block, each, kv_heads, block, SCALE_BYTES), each
