"""Device side of an engine: weights, state and compiled programs."""

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from fullstride.device.select import cores
from fullstride.llm.engine.adapters import filled
from fullstride.llm.engine.program_cache import ProgramCache
from fullstride.llm.engine.programs import Programs, StepOutput
from fullstride.llm.engine.state import EngineState, set_history, set_mask, shapes
from fullstride.llm.engine.wire import HISTORY, MASK, DecodeInput, MixedInput
from fullstride.llm.models.parameters import Weights
from fullstride.llm.models.tensor_parallel import POOL, mesh_of
from fullstride.llm.progress import OnPrograms
from fullstride.llm.weights.peft_adapter import Adapter

# XLA's estimate of memory counts a donated pool once for each operation that rewrites it, and would then search every
# program, in vain and for most of the time that compiling takes, for what to compute twice.
OPTIONS: dict[str, dict[str, int]] = {"gpu": {"xla_gpu_memory_limit_slop_factor": 1000}}
# Seconds between two calls of `progress` while no further program is ready.
TICK_SECONDS = 1.0
# Programs that compile in fewer seconds are not cached.
CACHED_SECONDS = 0.5
_EVENT = "/jax/core/compile/backend_compile_duration"
_count = 0
# Key of a program: its kind, rows, tiles, and blocks of a table.
Key = tuple[str, int, int, int]


def _listen(event: str, duration_secs: float, **_: str | int) -> None:
    global _count
    _count += event == _EVENT


jax.monitoring.register_event_duration_secs_listener(_listen)


def compiles() -> int:
    """Return the number of programs compiled or loaded from the persistent cache since this module was imported."""
    return _count


def keep(devices: Sequence[Any]) -> bool:
    """Cache compiled programs on disk in fullstride's cache, unless JAX already has a cache folder.

    Returns:
        Whether the runner has to do so, by a `ProgramCache`; otherwise JAX does. JAX does on CPUs, whose executables
        cannot be written again after they were read, and for several devices, whose all-reduce names memory of the
        process.

    """
    if jax.config.values["jax_compilation_cache_dir"] is None:
        if len(devices) == 1 and devices[0].platform == "gpu":
            return True
        from fullstride.step.jax.compile_cache import keep_compiled

        keep_compiled(seconds=CACHED_SECONDS)
        # JAX looks for a cache once: at the first compile, which may have been before this.
        compilation_cache.reset_cache()
    return False


class Runner:
    """Asynchronous runner of steps, in the order of the calls.

    Of several devices, each runs the whole step on its shard of weights and KV cache; the other state is replicated.
    """

    def __init__(
        self,
        programs: Programs,
        weights: Weights,
        devices: Sequence[Any],
        progress: OnPrograms | None = None,
        *,
        keeps: bool = False,
    ):
        """Compile every program that will run, or with `keeps` read it from the cache, which then has all of them."""
        self.programs, self.sizes, self.device = programs, programs.sizes, devices[0]
        self.mesh: Mesh | None = mesh_of(devices) if len(devices) > 1 else None
        self._shares = len(devices)
        self._leaves, self._tree = jax.tree.flatten(weights)
        # Made on the devices: a pool may be larger than the host's memory.
        self._fresh = jax.jit(self._blank, out_shardings=self.places()).lower().compile()
        self.state: EngineState = self._fresh()
        self._cache = ProgramCache(self.device, self._identity()) if keeps else None
        self.compiled = self._compile(progress)

    def reset(self) -> None:
        """Start over with an empty KV cache, after a failed step has consumed the old one."""
        for leaf in jax.tree.leaves(self.state):
            if not leaf.is_deleted():
                leaf.delete()
        self.state = self._fresh()

    def set_adapter(self, slot: int, adapter: Adapter, rank: int) -> None:
        """Put an adapter into a slot; steps that were dispatched before have what was there."""
        weights = jax.tree.unflatten(self._tree, self._leaves)
        self._leaves = jax.tree.leaves(filled(self.programs.model, weights, slot, adapter, rank, self._shares))

    def is_whole(self, rows: int) -> bool:
        """Return whether a decode step of `rows` rows is one operation."""
        whole = self.programs.kernels.fused_step
        return whole is not None and rows <= whole.rows

    def run(self, key: Key, packed: np.ndarray, quick: bool) -> StepOutput:
        """Dispatch a burst (`decode`), a `mixed` step, or one that verifies drafts (`verify`).

        A quick one is for rows that need at most a temperature.
        """
        kind, rows, tiles, width = key
        name = f"quick_{kind}" if quick and self.programs.kernels.static_burst else kind
        self.state, out = self.compiled[name, rows, tiles, width](self._leaves, self.state, packed)
        return out

    def set(self, kind: str, packed: np.ndarray) -> None:
        """Set the `history` or the `mask` of a row; see `state.set_history` and `state.set_mask`."""
        self.state = self.compiled[kind, 0, 0, 0](self.state, packed)

    def _blank(self) -> EngineState:
        made = shapes(self.programs.model, self.sizes).items()
        zeros = {name: jnp.zeros(shape, dtype) for name, (shape, dtype) in made}
        return EngineState(**zeros, scratch=self.programs.scratch())

    def places(self) -> EngineState:
        """Shardings of the parts of the state."""
        every = jax.tree.map(lambda _: self._whole(), jax.eval_shape(self._blank))
        return every if self.mesh is None else every._replace(pool=NamedSharding(self.mesh, POOL))

    def keys(self) -> list[Key]:
        """Keys of all programs to compile."""
        sizes, found = self.sizes, []
        for width in sizes.widths:
            found += [("mixed", sizes.rows, tiles, width) for tiles in sizes.tile_buckets]
            found += [("decode", rows, 0, width) for rows in sizes.row_buckets]
            found += [("verify", rows, 0, width) for rows in sizes.verify_buckets]
        if self.programs.kernels.static_burst:
            found += [(f"quick_{kind}", *rest) for kind, *rest in found]
        return [*found, ("history", 0, 0, 0), ("mask", 0, 0, 0)]

    def _compile(self, progress: OnPrograms | None) -> dict[Key, Any]:
        keys, found = self.keys(), {}
        cached = None if self._cache is None else sum(self._cache.path(key).exists() for key in keys)
        progress = progress or (lambda done, total, cached: None)
        progress(0, len(keys), cached)
        with ThreadPoolExecutor(min(len(keys), cores())) as pool:
            # Tracing holds Python's lock, compiling does not: largest programs first.
            options = OPTIONS.get(self.device.platform)
            futures = {pool.submit(self._program, key, options): key for key in keys}
            pending = set(futures)
            while pending:
                done, pending = wait(pending, TICK_SECONDS, FIRST_COMPLETED)
                found |= {futures[future]: future.result() for future in done}
                progress(len(found), len(keys), cached)
        if self._cache is not None:
            self._cache.remove_unused()
        return found

    def _program(self, key: Key, options: dict[str, int] | None) -> Any:
        if self._cache is not None:
            return self._cache.get(key, partial(self.lower, key), options)
        return self.lower(key).compile(options)

    def _identity(self) -> tuple[Any, ...]:
        """Return what the programs depend on, besides their keys: values whose `repr` tells them apart."""
        weights = [(leaf.shape, str(leaf.dtype)) for leaf in self._leaves]
        return self.programs.model, self.sizes, self.programs.kernels.name, OPTIONS, self._tree, weights

    def lower(self, key: Key) -> Any:
        """Trace a program for its shapes."""
        kind, rows, tiles, width = key
        sizes, programs, tree = self.sizes, self.programs, self._tree
        quick, verifies = kind.startswith("quick"), kind.endswith("verify")
        if kind == "history":
            words = HISTORY.size + sizes.max_length
            return self._lower(set_history, 0, self.state, self._words(words))
        if kind == "mask":
            words = MASK.size + self.state.masks.shape[1]
            return self._lower(set_mask, 0, self.state, self._words(words))

        def step(leaves, state, packed):
            weights = jax.tree.unflatten(tree, leaves)
            if tiles:
                return programs.mixed(weights, state, packed, rows, tiles, quick=quick)
            if verifies:
                return programs.verify(weights, state, packed, rows, quick=quick)
            return getattr(programs, kind)(weights, state, packed, rows)

        step.__name__ = f"{kind}_{rows}_{tiles}_{width}"
        entries = len(sizes.windows) * width
        drafts = sizes.drafts if verifies else 0
        words = MixedInput.size(rows, tiles, sizes.tile, entries) if tiles else DecodeInput.size(rows, entries, drafts)
        return self._lower(step, 1, self._leaves, self.state, self._words(words))

    def _lower(self, function: Callable[..., Any], state: int, *operands: Any) -> Any:
        """Trace a function that updates the state, its operand of that number, in place."""
        if self.mesh is not None:
            specs = jax.tree.map(lambda x: x.sharding.spec, operands)
            out = (specs[state], PartitionSpec()) if state else specs[state]
            name = function.__name__
            # Types cannot prove that all devices return the same values outside the KV cache.
            function = jax.shard_map(function, mesh=self.mesh, in_specs=specs, out_specs=out, check_vma=False)
            function.__name__ = name
        return jax.jit(function, donate_argnums=state).lower(*operands)

    def _words(self, count: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((count,), np.int32, sharding=self._whole())

    def _whole(self) -> Any:
        """Sharding that replicates an array on every device."""
        return SingleDeviceSharding(self.device) if self.mesh is None else NamedSharding(self.mesh, PartitionSpec())
