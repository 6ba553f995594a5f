"""Compiled side of a TrainStep: its inputs and outputs, its compilation, and XLA's analyses of it."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from fullstride.errors import ConfigError, one_of
from fullstride.step.jax.grouped import GroupedLeaves, grouped_layout
from fullstride.step.jax.loss import describe, split_key
from fullstride.step.jax.metrics import gathered
from fullstride.step.jax.retrace import RetraceWatch
from fullstride.step.jax.state import Blueprint, State
from fullstride.step.jax.trainable import checked_like, partitioned
from fullstride.step.jax.trees.ownership import copied, is_committed, strongly_typed
from fullstride.step.jax.trees.structure import Structure, split
from fullstride.step.jax.update import StepRecipe, differentiate, update

LAYOUTS = ("flat", "grouped")


@dataclass(frozen=True)
class CompileReport:
    """Cost and memory of a compiled step, as XLA reports them.

    Attributes:
        trace_s: seconds to trace and lower it.
        compile_s: seconds to compile it; few if the persistent cache had it.
        flops: floating-point operations of one call, as XLA counts them; None if it does not.
        bytes_accessed: bytes of all its operations' operands and results, an upper bound of the memory traffic.
        argument_bytes: bytes of state, batch and key.
        output_bytes: bytes of new state and metrics.
        aliased_bytes: bytes of outputs that lie in donated buffers.
        temporary_bytes: bytes that it needs while it runs.
        executable: JAX's own object.

    """

    trace_s: float
    compile_s: float
    flops: float | None
    bytes_accessed: float | None
    argument_bytes: int
    output_bytes: int
    aliased_bytes: int
    temporary_bytes: int
    executable: Any

    @classmethod
    def of(cls, executable: Any, trace_s: float, compile_s: float) -> "CompileReport":
        """Read XLA's analyses."""
        cost, memory = executable.cost_analysis() or {}, executable.memory_analysis()
        return cls(
            trace_s=trace_s,
            compile_s=compile_s,
            flops=cost.get("flops"),
            bytes_accessed=cost.get("bytes accessed"),
            argument_bytes=memory.argument_size_in_bytes,
            output_bytes=memory.output_size_in_bytes,
            aliased_bytes=memory.alias_size_in_bytes,
            temporary_bytes=memory.temp_size_in_bytes,
            executable=executable,
        )

    @property
    def hlo(self) -> str:
        """Return the optimised program as text."""
        return self.executable.as_text()

    @property
    def peak_bytes(self) -> int:
        """Device memory of a call: arguments, temporaries, and outputs that have no donated buffer."""
        return self.argument_bytes + self.temporary_bytes + self.output_bytes - self.aliased_bytes

    def __str__(self) -> str:
        work = "" if self.flops is None else f"{self.flops / 1e9:.2f} GFLOP, "
        return (
            f"traced in {self.trace_s:.1f} s, compiled in {self.compile_s:.1f} s; {work}"
            f"{self.peak_bytes / 2**20:.1f} MiB, {self.temporary_bytes / 2**20:.1f} of them temporary"
        )


class StepProgram:
    """One model's step: pure functions of flat buffers, compiled by `jax.jit`.

    Attributes:
        blueprint: structures that its states share.
        leaves: shapes, dtypes and shardings of a state's leaves.
        jitted: the compiled function of (buffers, fixed, batch, key).

    """

    def __init__(
        self,
        recipe: StepRecipe,
        model: Any,
        wrt: Any,
        layout: str,
        donate: bool,
        steps: int,
        retraces: RetraceWatch,
    ):
        one_of("layout", layout, LAYOUTS)
        self.recipe, self.wrt, self.steps, self.retraces = recipe, wrt, steps, retraces
        self.sharding = recipe.sharding
        structure, params, fixed = partitioned(model, wrt)
        carry = eqx.filter_eval_shape(recipe.start, params)
        shape, (leaves,) = split(carry, lambda x: isinstance(x, jax.ShapeDtypeStruct))
        trainable = len(jax.tree.leaves(params))
        flat = GroupedLeaves(tuple((i,) for i in range(len(leaves))), trainable)
        self.blueprint = Blueprint(structure, shape, flat, trainable)
        spread = self.sharding
        self.leaves = tuple(
            jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=spread and NamedSharding(spread.mesh, spread.rule(name, x.shape))
            )
            for name, x in zip(shape.names(), leaves, strict=True)
        )
        self.fixed = tuple(map(self._copied, fixed))
        if layout == "grouped":
            change = partial(changed, recipe, self.blueprint, jax.tree.structure(params))
            loss = jax.ShapeDtypeStruct((), jnp.float32)
            self.blueprint.layout = grouped_layout(shape.paths(), self.leaves, trainable, change, loss)
        self.buffers = self._buffers()
        out = None if self.sharding is None else (tuple(b.sharding for b in self.buffers), None)
        self.jitted: Any = jax.jit(self._traced, donate_argnums=(0,) if donate else (), out_shardings=out)

    def _copied(self, leaf: Any) -> jax.ShapeDtypeStruct:
        kind = jax.eval_shape(jnp.asarray, leaf)
        own = leaf.sharding if is_committed(leaf) else None
        sharding = own if self.sharding is None else self.sharding.everywhere
        return jax.ShapeDtypeStruct(kind.shape, kind.dtype, sharding=sharding)

    def _buffers(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        kinds = jax.eval_shape(
            self.blueprint.layout.pack, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self.leaves]
        )
        if self.sharding is None:
            return kinds
        placed = []
        for kind, group in zip(kinds, self.blueprint.layout.groups, strict=True):
            own: Any = self.leaves[group[0]].sharding
            # A group lies along a new first axis.
            place = own if len(group) == 1 else NamedSharding(own.mesh, PartitionSpec(None, *own.spec))
            placed.append(jax.ShapeDtypeStruct(kind.shape, kind.dtype, sharding=place))
        return tuple(placed)

    def start(self, model: Any) -> State:
        """Return a state before the first step, made of copies.

        Raises:
            ConfigError: for a model of another structure, shape or dtype than the program's.

        """
        structure, params, fixed = partitioned(model, self.wrt)
        self._check_model(structure, [*jax.tree.leaves(params), *fixed])
        shape, (leaves,) = split(self.recipe.start(params), eqx.is_array)
        checked_like(shape, leaves, self.blueprint.carry, self.leaves)
        return self.state([copied(x) for x in leaves], tuple(map(strongly_typed, fixed)), 0)

    def _check_model(self, structure: Structure, arrays: list[Any]) -> None:
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in arrays):
            raise ConfigError("model: it holds shapes instead of arrays; give init() the model itself")
        if structure is not self.blueprint.model:
            raise ConfigError("model: its structure is not that of the model of this step; build another step for it")
        kinds = [*self.leaves[: self.blueprint.trainable], *self.fixed]
        for name, x, kind in zip((*structure.names(0), *structure.names(1)), arrays, kinds, strict=True):
            if (x.shape, x.dtype) != (kind.shape, kind.dtype):
                raise ConfigError(f"model{name} is {describe(x)}; this step was built for {describe(kind)}")

    def state(self, leaves: Any, fixed: tuple[Any, ...], count: int | None) -> State:
        """Return a state that takes over these leaves, placed on their devices."""
        if self.sharding is None:
            return State(self.blueprint.layout.pack(leaves), fixed, self.blueprint, count, fresh=True)
        leaves = [jax.device_put(x, kind.sharding) for x, kind in zip(leaves, self.leaves, strict=True)]
        shardings = tuple(b.sharding for b in self.buffers)
        buffers = jax.jit(self.blueprint.layout.pack, out_shardings=shardings)(leaves)
        return State(buffers, jax.device_put(fixed, self.sharding.everywhere), self.blueprint, count)

    def abstract(self, device: Any = None) -> State:
        """A state of shapes, dtypes and shardings alone; its buffers are committed to the device, if there is one."""
        buffers = self.buffers
        if device is not None:
            place = jax.sharding.SingleDeviceSharding(device)
            buffers = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place) for x in buffers)
        return State(buffers, self.fixed, self.blueprint, 0)

    def _traced(self, buffers: Any, fixed: Any, batch: Any, key: Any) -> tuple[Any, dict[str, Any]]:
        leaves = self.blueprint.layout.unpack(buffers)
        carry = self.blueprint.carry
        checked_like(carry, leaves, carry, self.leaves, "something outside of the step")
        with self.retraces.tracing(batch=batch, key=key, fixed=fixed):
            step = partial(self._step, self.blueprint.rest(fixed))
            if self.steps == 1:
                return step(buffers, (batch, key))
            for path, x in jax.tree_util.tree_leaves_with_path(batch):
                if x.ndim == 0 or x.shape[0] != self.steps:
                    raise ConfigError(
                        f"batch{jax.tree_util.keystr(path)} is {describe(x)}; steps_per_call={self.steps} needs as "
                        "many batches along axis 0"
                    )
            return jax.lax.scan(step, buffers, (batch, split_key(key, self.steps)))

    def _step(self, rest: Any, buffers: Any, given: tuple[Any, Any]) -> tuple[Any, dict[str, Any]]:
        blueprint, recipe = self.blueprint, self.recipe
        carry = blueprint.carry.build(blueprint.layout.unpack(buffers))
        grads, loss, aux = differentiate(recipe, carry.params, rest, *given, carry.scale)
        flat, shape = jax.tree.flatten(grads)
        if self.sharding is not None:
            kinds = self.leaves[: blueprint.trainable]
            flat = [jax.lax.with_sharding_constraint(g, kind.sharding) for g, kind in zip(flat, kinds, strict=True)]
        buffers, report = blueprint.layout.update(partial(changed, recipe, blueprint, shape), buffers, flat, loss)
        return buffers, gathered(loss, aux, report)


def changed(
    recipe: StepRecipe, blueprint: Blueprint, shape: Any, leaves: Any, grads: Any, loss: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The update on flat leaves: the new ones, and the report."""
    carry = blueprint.carry.build(leaves)
    new, report = update(recipe, carry, jax.tree.unflatten(shape, grads), loss)
    structure, (found,) = split(new, eqx.is_array)
    checked_like(structure, found, blueprint.carry, leaves)
    # A weak type would have the next step traced again.
    return tuple(jax.lax.convert_element_type(x, x.dtype) for x in found), report
