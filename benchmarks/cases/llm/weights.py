"""Random weights that are made on the devices: a host draws and sends them for longer than a bench takes."""

import functools
import zlib
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from benchmarks.cases.llm.work import RandomParameters


class MadeParameters(RandomParameters):
    """As `RandomParameters` with other numbers: every device makes its own part, of a whole that is always the same."""

    def make(self, name: str, device: Any, rows: slice | None = None, columns: slice | None = None) -> Array:
        """A part of one, on a device of JAX's; whole where no part is given."""
        shape = self._shapes[name]
        given = (rows or slice(None), columns or slice(None))[: len(shape)]
        bounds = [part.indices(size) for part, size in zip(given, shape, strict=True)]
        starts = np.array([start for start, *_ in bounds], np.int32)
        sizes = tuple(stop - start for start, stop, _ in bounds)
        own = jax.device_put((np.uint32(zlib.crc32(name.encode())), starts), device)
        return _drawn(shape, sizes, self._dtype)(*own)

    def __getitem__(self, name: str) -> np.ndarray:
        """One parameter, on the host."""
        return np.asarray(self.make(name, jax.devices()[0]))


@functools.cache
def _drawn(shape: tuple[int, ...], sizes: tuple[int, ...], dtype: Any) -> Any:
    """What makes a part of such a parameter, by its seed and where the part begins; the whole is never stored."""

    def draw(seed, starts):
        values = jax.random.normal(jax.random.key(seed), shape, jnp.float32)
        part = lax.dynamic_slice(values, tuple(starts), sizes)
        return (1 + 0.1 * part if len(shape) == 1 else 0.03 * part).astype(dtype)

    return jax.jit(draw)


def on_devices(loaded: Any) -> Any:
    """The same model with weights that are made on the devices, where they are random anyhow."""
    if not isinstance(loaded.parameters, RandomParameters):
        return loaded
    made = MadeParameters(loaded.config, loaded.config.dtype)
    return SimpleNamespace(config=loaded.config, parameters=made, tokenizer=loaded.tokenizer)
