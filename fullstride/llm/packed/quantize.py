"""Packed formats made from numbers: rounded to the nearest code, without data."""

from collections.abc import Callable

import ml_dtypes
import numpy as np
from jaxtyping import Float

from fullstride.llm.packed.formats import CodedRows

# Largest number of e4m3.
MOST = 448.0
# Numbers that share a scale in `int8` and `int4`, as in GGUF's Q8_0 and Q4_1.
GROUP = 32


def to_fp8(values: Float[np.ndarray, "rows inputs"]) -> CodedRows:
    """Return e4m3 codes (arXiv:2209.05433) with a scale for each row, an output channel."""
    values = values.astype(np.float32)
    scales = _nonzero(np.abs(values).max(-1, initial=0) / np.float32(MOST))
    codes = (values / scales[:, None]).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return CodedRows("fp8", codes, scales[:, None, None].view(np.uint8))


def to_int8(values: Float[np.ndarray, "rows inputs"]) -> CodedRows:
    """Return 8-bit codes in groups of 32 around zero: GGUF's Q8_0."""
    groups = values.astype(np.float32).reshape(len(values), -1, GROUP)
    scales = (np.abs(groups).max(-1) / np.float32(127)).astype(np.float16)
    codes = np.clip(np.rint(groups / _nonzero(scales.astype(np.float32))[..., None]), -128, 127) + 128
    return CodedRows("Q8_0", codes.astype(np.uint8).reshape(values.shape), scales[..., None].view(np.uint8))


def to_int4(values: Float[np.ndarray, "rows inputs"]) -> CodedRows:
    """Return 4-bit codes in groups of 32 from their minima on: GGUF's Q4_1."""
    groups = values.astype(np.float32).reshape(len(values), -1, GROUP)
    minima = groups.min(-1).astype(np.float16)
    scales = ((groups.max(-1) - minima.astype(np.float32)) / np.float32(15)).astype(np.float16)
    above = groups - minima.astype(np.float32)[..., None]
    codes = np.clip(np.rint(above / _nonzero(scales.astype(np.float32))[..., None]), 0, 15).astype(np.uint8)
    records = np.stack([scales, minima], axis=-1).view(np.uint8)
    return CodedRows("Q4_1", codes.reshape(values.shape), records)


def _nonzero(scales: np.ndarray) -> np.ndarray:
    """Scales to divide by: of a group of zeros any does."""
    return np.where(scales == 0, np.float32(1), scales)


MADE: dict[str, Callable[[np.ndarray], CodedRows]] = {"fp8": to_fp8, "int8": to_int8, "int4": to_int4}
