"""Dequantization of ggml's packed numbers, vectorized over blocks.

Each function takes blocks as a structured array and a float32 array (blocks, numbers) to fill; the arithmetic, and so
the last bit, is that of ggml's reference code (ggml-quants.c): scales are halves, products and sums are in float32.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8

from fullstride.llm.weights.gguf_file import PackedFormat
from fullstride.llm.weights.parameters import PLAIN
from fullstride.llm.weights.stacked_experts import BIAS, CODES

# Blocks that fit the cache together with what is made of them.
NUMBERS_AT_ONCE = 1 << 17
# Offsets of the two-bit fields of a byte, one row per field.
PAIRS = np.array([[0], [2], [4], [6]], np.uint8)
# Values of the sixteen codes of the IQ4 types: closer together near zero, as weights are.
IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)


def dequantize(
    kind: PackedFormat, data: UInt8[np.ndarray, "rows bytes"], dtype: np.dtype
) -> Float[np.ndarray, "rows numbers"]:
    """Return rows of packed bytes as rows of `dtype`; a view if they already are."""
    if kind.name in PLAIN:
        return data.view(PLAIN[kind.name]).astype(dtype, copy=False)
    layout, unpack = PACKED[kind.name]
    blocks = np.ascontiguousarray(data).reshape(-1).view(np.dtype(layout))
    out = np.empty((len(blocks), kind.numbers), dtype)
    step = NUMBERS_AT_ONCE // kind.numbers
    work = np.empty((min(step, len(blocks)), kind.numbers), np.float32)
    for start in range(0, len(blocks), step):
        some = blocks[start : start + step]
        unpack(some, work[: len(some)])
        out[start : start + step] = work[: len(some)]
    return out.reshape(len(data), -1)


def _column(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float32)[..., None]


def _nibbles(packed: np.ndarray, out: np.ndarray) -> None:
    """Write the low halves of all bytes, then the high halves."""
    half = packed.shape[-1]
    np.bitwise_and(packed, 15, out=out[..., :half], casting="unsafe")
    np.right_shift(packed, 4, out=out[..., half:], casting="unsafe")


def _halves(blocks: np.ndarray, out: np.ndarray) -> None:
    """Four bits, perhaps a fifth, of numbers around zero or above a minimum."""
    parts = blocks.dtype.fields or {}
    _nibbles(blocks["q"], out)
    if "h" in parts:
        out += np.unpackbits(blocks["h"], axis=-1, bitorder="little") << np.uint8(4)
    if "m" not in parts:
        out -= 16 if "h" in parts else 8
    out *= _column(blocks["d"])
    if "m" in parts:
        out += _column(blocks["m"])


def _q8_0(blocks: np.ndarray, out: np.ndarray) -> None:
    np.multiply(blocks["q"], _column(blocks["d"]), out=out)


def _q2_k(blocks: np.ndarray, out: np.ndarray) -> None:
    np.bitwise_and(blocks["q"] >> PAIRS, 3, out=out.reshape(-1, 2, 4, 32), casting="unsafe")
    groups = out.reshape(-1, 16, 16)
    groups *= _column(_column(blocks["d"]) * (blocks["s"] & 15))
    groups -= _column(_column(blocks["m"]) * (blocks["s"] >> 4))


def _q3_k(blocks: np.ndarray, out: np.ndarray) -> None:
    np.bitwise_and(blocks["q"] >> PAIRS, 3, out=out.reshape(-1, 2, 4, 32), casting="unsafe")
    # A third bit that is not set is 4 less.
    unset = ((blocks["h"] >> np.arange(8, dtype=np.uint8)[:, None]) & 1) ^ 1
    eighths = out.reshape(-1, 8, 32)
    eighths -= unset << 2
    low = np.concatenate([blocks["s"][:, :8] & 15, blocks["s"][:, :8] >> 4], axis=-1)
    high = ((blocks["s"][:, None, 8:] >> PAIRS) & 3).reshape(-1, 16)
    scales = (low | high << 4).astype(np.int8) - np.int8(32)
    groups = out.reshape(-1, 16, 16)
    groups *= _column(_column(blocks["d"]) * scales)


def _q4_k(blocks: np.ndarray, out: np.ndarray) -> None:
    """Dequantize Q4_K, and Q5_K, which has a fifth bit per number."""
    _nibbles(blocks["q"], out.reshape(-1, 4, 64))
    groups = out.reshape(-1, 8, 32)
    if "h" in (blocks.dtype.fields or {}):
        groups += ((blocks["h"] >> np.arange(8, dtype=np.uint8)[:, None]) & 1) << 4
    # Eight scales and eight minima of a block, (blocks, 8, 1): six bits each, spread over twelve bytes.
    a, b, c = np.moveaxis(blocks["s"].reshape(-1, 3, 4), 1, 0)
    scales = np.concatenate([a & 63, (c & 15) | (a >> 6 << 4)], axis=-1)
    minima = np.concatenate([b & 63, (c >> 4) | (b >> 6 << 4)], axis=-1)
    groups *= _column(_column(blocks["d"]) * scales)
    groups -= _column(_column(blocks["m"]) * minima)


def _q6_k(blocks: np.ndarray, out: np.ndarray) -> None:
    _nibbles(blocks["q"], out.reshape(-1, 2, 128))
    high = (blocks["h"][:, :, None] >> PAIRS) & 3
    out += (high << 4).reshape(len(blocks), 256)
    out -= 32
    groups = out.reshape(-1, 16, 16)
    groups *= _column(_column(blocks["d"]) * blocks["s"])


def _iq4_nl(blocks: np.ndarray, out: np.ndarray) -> None:
    out[:, :16], out[:, 16:] = IQ4[blocks["q"] & 15], IQ4[blocks["q"] >> 4]
    out *= _column(blocks["d"])


def _iq4_xs(blocks: np.ndarray, out: np.ndarray) -> None:
    groups = out.reshape(-1, 8, 32)
    groups[..., :16], groups[..., 16:] = IQ4[blocks["q"] & 15], IQ4[blocks["q"] >> 4]
    low = np.stack([blocks["s"] & 15, blocks["s"] >> 4], axis=-1).reshape(-1, 8)
    high = (blocks["h"][:, None] >> np.arange(0, 16, 2, dtype=np.uint16)) & 3
    groups *= _column(_column(blocks["d"]) * ((low | high << 4).astype(np.float32) - 32))


def _mxfp4(blocks: np.ndarray, out: np.ndarray) -> None:
    out[:, :16], out[:, 16:] = CODES[blocks["q"] & 15], CODES[blocks["q"] >> 4]
    np.ldexp(out, blocks["e"].astype(np.int32)[:, None] - BIAS, out=out)


# Layout of the blocks of each type in a file, and the function that unpacks them.
PACKED: dict[str, tuple[list[tuple[Any, ...]], Callable[[np.ndarray, np.ndarray], None]]] = {
    "Q4_0": ([("d", "<f2"), ("q", "u1", 16)], _halves),
    "Q4_1": ([("d", "<f2"), ("m", "<f2"), ("q", "u1", 16)], _halves),
    "Q5_0": ([("d", "<f2"), ("h", "u1", 4), ("q", "u1", 16)], _halves),
    "Q5_1": ([("d", "<f2"), ("m", "<f2"), ("h", "u1", 4), ("q", "u1", 16)], _halves),
    "Q8_0": ([("d", "<f2"), ("q", "i1", 32)], _q8_0),
    "Q2_K": ([("s", "u1", 16), ("q", "u1", (2, 1, 32)), ("d", "<f2"), ("m", "<f2")], _q2_k),
    "Q3_K": ([("h", "u1", (1, 32)), ("q", "u1", (2, 1, 32)), ("s", "u1", 12), ("d", "<f2")], _q3_k),
    "Q4_K": ([("d", "<f2"), ("m", "<f2"), ("s", "u1", 12), ("q", "u1", (4, 32))], _q4_k),
    "Q5_K": ([("d", "<f2"), ("m", "<f2"), ("s", "u1", 12), ("h", "u1", (1, 32)), ("q", "u1", (4, 32))], _q4_k),
    "Q6_K": ([("q", "u1", (2, 64)), ("h", "u1", (2, 32)), ("s", "i1", 16), ("d", "<f2")], _q6_k),
    "IQ4_NL": ([("d", "<f2"), ("q", "u1", 16)], _iq4_nl),
    "IQ4_XS": ([("d", "<f2"), ("h", "<u2"), ("s", "u1", 4), ("q", "u1", (8, 16))], _iq4_xs),
    "MXFP4": ([("e", "u1"), ("q", "u1", 16)], _mxfp4),
}
