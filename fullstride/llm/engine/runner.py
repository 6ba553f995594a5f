"""The device's side of an engine: weights, state and compiled programs."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fullstride.llm.engine.packing import Decode, Mixed
from fullstride.llm.engine.programs import Out, Programs
from fullstride.llm.engine.state import BIASES, State, set_history, set_mask, shapes
from fullstride.llm.models.parameters import Weights

# XLA's estimate of memory counts a donated pool once for each operation that rewrites it, and would then search every
# program, in vain and for most of the time that compiling takes, for what to compute twice.
OPTIONS: dict[str, dict[str, int]] = {"gpu": {"xla_gpu_memory_limit_slop_factor": 1000}}
# How many of how many programs are ready.
Progress = Callable[[int, int], None]
# A program by what it is for: its kind, rows, tiles, and blocks of a table.
Key = tuple[str, int, int, int]


class Runner:
    """Runs steps, in the order of the calls; nothing is waited for."""

    def __init__(self, programs: Programs, weights: Weights, device: Any, progress: Progress | None = None):
        """Compile everything that will ever run."""
        self.programs, self.sizes, self.device = programs, programs.sizes, device
        self._leaves, self._tree = jax.tree.flatten(weights)
        place = jax.sharding.SingleDeviceSharding(device)
        # Made on the device: a pool may be larger than the host's memory.
        self._fresh = jax.jit(self._blank, out_shardings=place).lower().compile()
        self.state: State = self._fresh()
        self.compiled = self._compile(progress)

    def reset(self) -> None:
        """Start over with an empty pool, after a step that failed took the old one with it."""
        for leaf in jax.tree.leaves(self.state):
            if not leaf.is_deleted():
                leaf.delete()
        self.state = self._fresh()

    def decode(self, packed: np.ndarray, rows: int, width: int, *, quick: bool = False) -> Out:
        """Dispatch a burst; a quick one is of rows that want a temperature at most."""
        kind = "quick" if quick and self.programs.kernels.quick else "decode"
        self.state, out = self.compiled[kind, rows, 0, width](self._leaves, self.state, packed)
        return out

    def mixed(self, packed: np.ndarray, tiles: int, width: int) -> Out:
        """Dispatch a mixed step."""
        self.state, out = self.compiled["mixed", self.sizes.rows, tiles, width](self._leaves, self.state, packed)
        return out

    def set_history(self, packed: np.ndarray) -> None:
        """See `state.set_history`."""
        self.state = self.compiled["history", 0, 0, 0](self.state, packed)

    def set_mask(self, packed: np.ndarray) -> None:
        """See `state.set_mask`."""
        self.state = self.compiled["mask", 0, 0, 0](self.state, packed)

    def _blank(self) -> State:
        made = shapes(self.programs.model, self.sizes).items()
        zeros = {name: jnp.zeros(shape, dtype) for name, (shape, dtype) in made}
        return State(**zeros, scratch=self.programs.scratch())

    def keys(self) -> list[Key]:
        """Everything that is compiled."""
        sizes = self.sizes
        mixed = [("mixed", sizes.rows, tiles, width) for tiles in sizes.tile_buckets for width in sizes.widths]
        kinds = ("decode", "quick") if self.programs.kernels.quick else ("decode",)
        decode = [(kind, rows, 0, width) for kind in kinds for rows in sizes.row_buckets for width in sizes.widths]
        return [*mixed, *decode, ("history", 0, 0, 0), ("mask", 0, 0, 0)]

    def _compile(self, progress: Progress | None) -> dict[Key, Any]:
        keys, found = self.keys(), {}
        with ThreadPoolExecutor(min(len(keys), os.cpu_count() or 1)) as pool:
            # Tracing holds Python's lock, compiling does not: largest programs first.
            options = OPTIONS.get(self.device.platform)
            futures = {pool.submit(self.lower(key).compile, options): key for key in keys}
            for done, future in enumerate(as_completed(futures), 1):
                found[futures[future]] = future.result()
                if progress is not None:
                    progress(done, len(keys))
        return found

    def lower(self, key: Key) -> Any:
        """A program, traced for its shapes."""
        kind, rows, tiles, width = key
        sizes, programs, tree = self.sizes, self.programs, self._tree
        if kind == "history":
            words = 2 + 2 * BIASES + sizes.max_length
            return jax.jit(set_history, donate_argnums=0).lower(self.state, self._words(words))
        if kind == "mask":
            words = 1 + self.state.masks.shape[1]
            return jax.jit(set_mask, donate_argnums=0).lower(self.state, self._words(words))

        def step(leaves, state, packed):
            weights = jax.tree.unflatten(tree, leaves)
            if kind != "mixed":
                return getattr(programs, kind)(weights, state, packed, rows)
            return programs.mixed(weights, state, packed, rows, tiles)

        step.__name__ = f"{kind}_{rows}_{tiles}_{width}"
        words = Mixed.size(rows, tiles, sizes.tile, width) if kind == "mixed" else Decode.size(rows, width)
        return jax.jit(step, donate_argnums=1).lower(self._leaves, self.state, self._words(words))

    def _words(self, count: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((count,), np.int32, sharding=jax.sharding.SingleDeviceSharding(self.device))
