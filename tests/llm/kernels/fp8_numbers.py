"""KV caches of e4m3 codes with scales, made and read byte by byte in NumPy."""

import ml_dtypes
import numpy as np

E4M3, MOST, LARGEST_SCALE = ml_dtypes.float8_e4m3fn, 448.0, 255.0
# A scale that nobody reads, though it is a number: 0 times it is 0.
UNSEEN = 0x7F7F


def scales_of(x: np.ndarray) -> np.ndarray:
    """Return the scales of heads, of the last axis: bf16 numbers in fp64."""
    peak = np.abs(x.astype(np.float32)).max(-1) * np.float32(1 / MOST)
    return np.clip(peak, 2.0**-100, LARGEST_SCALE).astype(ml_dtypes.bfloat16).astype(np.float64)


def codes_of(x: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return the nearest codes, as NumPy's own conversion finds them."""
    wide = x.astype(np.float32) * (np.float32(1) / scales[..., None].astype(np.float32))
    return np.clip(wide, -MOST, MOST).astype(E4M3)


def rounded(x: np.ndarray) -> np.ndarray:
    """Return the numbers that are kept of heads, in fp64."""
    scales = scales_of(x)
    return codes_of(x, scales).astype(np.float64) * scales[..., None]


def offsets(pool: np.ndarray, slots: np.ndarray, block: int) -> np.ndarray:
    """Return where the two bytes of each slot's and head's scale are in the bytes of a layer's keys or values."""
    whole, kv_heads, head_dim = pool.shape[2] // block, *pool.shape[3:]
    coded = max(n for n in range(whole) if n + -(-2 * n // head_dim) <= whole)
    heads = (slots // block)[:, None] * kv_heads + np.arange(kv_heads)
    first = coded * block * kv_heads * head_dim + 2 * (heads * block + (slots % block)[:, None])
    return np.stack([first, first + 1], -1)


def packed(x: np.ndarray, block: int) -> np.ndarray:
    """Return the KV cache of numbers (layers, 2, slots, kv_heads, head_dim); NaN is what nobody sees."""
    layers, _, slots, kv_heads, head_dim = x.shape
    more = -(-2 * (slots // block) // head_dim) * block
    pool = np.full((layers, 2, slots + more, kv_heads, head_dim), 0xFF, np.uint8)
    with np.errstate(invalid="ignore"):
        scales = scales_of(x)
        pool[:, :, :slots] = codes_of(x, scales).view(np.uint8)
        bits = (scales * 2.0**120).astype(ml_dtypes.bfloat16).view(np.uint16)
    bits[np.isnan(scales)] = UNSEEN
    flat = pool.reshape(layers, 2, -1)
    flat[:, :, offsets(pool, np.arange(slots), block)] = bits[..., None].view(np.uint8)
    return pool


def numbers(pool: np.ndarray, slots: np.ndarray, block: int) -> np.ndarray:
    """Return what slots of a KV cache hold, in fp64."""
    pool = np.ascontiguousarray(pool)
    stored = np.ascontiguousarray(pool.reshape(*pool.shape[:2], -1)[:, :, offsets(pool, slots, block)])
    scales = stored.view(ml_dtypes.bfloat16)[..., 0].astype(np.float64) * 2.0**-120
    return pool[:, :, slots].view(E4M3).astype(np.float64) * scales[..., None]


def restored(pool: np.ndarray, before: np.ndarray, slots: np.ndarray, block: int) -> np.ndarray:
    """Return a KV cache with some slots as they were before."""
    pool = pool.copy()
    pool[:, :, slots] = before[:, :, slots]
    places = offsets(pool, slots, block)
    flat, old = (x.reshape(*x.shape[:2], -1) for x in (pool, before))
    flat[:, :, places] = old[:, :, places]
    return pool
