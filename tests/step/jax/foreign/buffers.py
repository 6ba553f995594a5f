"""Memory that is filled again and again, and work that is still running when a call comes back."""

import functools
import time
from typing import Any

import jax
import numpy as np

# JAX reads NumPy arrays that begin at a multiple of this many bytes where they lie.
ALIGNED = 64


def aligned(shape: tuple[int, ...], offset: int = 0) -> np.ndarray:
    """A buffer of float32 that begins at a multiple of `ALIGNED` bytes, or so many after one."""
    size = 4 * int(np.prod(shape, dtype=int))
    raw = np.zeros(size + 2 * ALIGNED, np.uint8)
    start = -raw.ctypes.data % ALIGNED + offset
    return raw[start : start + size].view(np.float32).reshape(shape)


def slow_zeros() -> Any:
    """Two zeros on the device that are there in a fraction of a second: what depends on them waits, and only that."""
    return _slow(np.int32(_count()))


@jax.jit
def _slow(count: Any) -> Any:
    return np.float32(0) * jax.lax.fori_loop(0, count, lambda _, x: jax.numpy.sin(x), np.ones(2, np.float32))


@functools.cache
def _count() -> int:
    """Iterations that take 0.15 s."""
    few = 10_000
    _slow(np.int32(few)).block_until_ready()
    began = time.perf_counter()
    _slow(np.int32(few)).block_until_ready()
    return int(few * 0.15 / (time.perf_counter() - began))
