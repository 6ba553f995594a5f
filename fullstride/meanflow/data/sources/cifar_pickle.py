"""CIFAR's batches, without running what a pickle asks for.

A pickle names functions to call. Here three names stand for small classes that can hold an array of bytes, and any
other is refused; NumPy's own are not called either.
"""

import io
import pickle
from typing import Any

import numpy as np


class _Bytes:
    """What stands for the type of an array: unsigned bytes."""

    def __init__(self, code: bytes | str, *flags: Any):
        if code not in (b"u1", "u1"):
            raise pickle.UnpicklingError(f"an array of type {code!r}, expected bytes")

    def __setstate__(self, state: Any) -> None:
        """Byte order and the like, which bytes do not have."""


class _Array:
    """What stands for NumPy's arrays while they are read."""

    def __init__(self, *placeholder: Any):
        self.values = np.empty(0, np.uint8)

    def __setstate__(self, state: tuple) -> None:
        _, shape, _, fortran, data = state
        self.values = np.frombuffer(data, np.uint8).reshape(shape, order="F" if fortran else "C")


NAMES = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Bytes,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in NAMES:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no batch of CIFAR does")
        return NAMES[module, name]


def read_batch(data: bytes, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Pictures (rows, 3, 32, 32) and labels 0..9 of a batch as Python 2 pickled it.

    Raises:
        ValueError: for anything else.

    """
    try:
        batch = _Unpickler(io.BytesIO(data), encoding="bytes").load()
    # A hostile or damaged stream leads an unpickler into any exception.
    except Exception as error:
        raise ValueError(f"no batch of CIFAR-10 ({error})") from error
    pixels, labels = (batch.get(key) if isinstance(batch, dict) else None for key in (b"data", b"labels"))
    if not isinstance(pixels, _Array) or pixels.values.shape != (rows, 3 * 32 * 32):
        raise ValueError(f"no array of {rows} x 3072 bytes under 'data'")
    if not isinstance(labels, list) or len(labels) != rows or not all(type(x) is int and 0 <= x < 10 for x in labels):
        raise ValueError(f"no list of {rows} labels from 0 to 9 under 'labels'")
    return pixels.values.reshape(rows, 3, 32, 32), np.array(labels, dtype=np.int64)
