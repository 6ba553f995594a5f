"""Rows of GGUF's packed types as codes and records, without a loss: the same bits in another order."""

from collections.abc import Callable

import numpy as np
from jaxtyping import UInt8

from fullstride.llm.packed.formats import CodedRows
from fullstride.llm.weights.dequantize import PACKED, PAIRS

# Numbers of the file's blocks that are taken apart at once, so that what is made of them fits the cache.
AT_ONCE = 1 << 20


def coded(kind: str, data: UInt8[np.ndarray, "rows bytes"]) -> CodedRows | None:
    """Return rows of a type as codes and records, or None if the type has no packed format here."""
    if kind not in _SPLIT:
        return None
    layout, split = np.dtype(PACKED[kind][0]), _SPLIT[kind]
    step = max(1, AT_ONCE // data.shape[1])
    parts = []
    for start in range(0, len(data), step):
        some = np.ascontiguousarray(data[start : start + step])
        codes, records = split(some.reshape(-1).view(layout))
        parts.append((codes.reshape(len(some), -1), records.reshape(len(some), -1, records.shape[-1])))
    return CodedRows(kind, *(np.concatenate(each) for each in zip(*parts, strict=True)))


def _bytes(*fields: np.ndarray) -> np.ndarray:
    """Join fields of blocks as bytes, one after another."""
    return np.concatenate([np.ascontiguousarray(each)[..., None].view(np.uint8) for each in fields], axis=-1)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """Return the low halves of the bytes of the last axis, then the high ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _q4_0(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return _nibbles(blocks["q"]), _bytes(blocks["d"])


def _q4_1(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return _nibbles(blocks["q"]), _bytes(blocks["d"], blocks["m"])


def _q8_0(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return blocks["q"].view(np.uint8) ^ np.uint8(128), _bytes(blocks["d"])


def _q4_k(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    a, b, c = np.moveaxis(blocks["s"].reshape(-1, 3, 4), 1, 0)
    scales = np.concatenate([a & 63, (c & 15) | (a >> 6 << 4)], axis=-1)
    minima = np.concatenate([b & 63, (c >> 4) | (b >> 6 << 4)], axis=-1)
    six = np.stack([scales, minima], axis=1)
    low = (six[..., 0::2] & 15) | (six[..., 1::2] << 4)
    fields = (six >> 4).reshape(-1, 2, 2, 4)
    high = np.bitwise_or.reduce(fields << np.arange(0, 8, 2, dtype=np.uint8), axis=-1)
    record = [_bytes(blocks["d"], blocks["m"]), low.reshape(-1, 8), high.reshape(-1, 4)]
    return _nibbles(blocks["q"]), np.concatenate(record, axis=-1)


def _q6_k(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    high = (blocks["h"][:, :, None] >> PAIRS) & 3
    codes = _nibbles(blocks["q"]).reshape(-1, 256) | (high << 4).reshape(-1, 256)
    return codes, np.concatenate([blocks["s"].view(np.uint8), _bytes(blocks["d"])], axis=-1)


_SPLIT: dict[str, Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
}
