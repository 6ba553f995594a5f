"""Compiled side of a TrainStep: its inputs and outputs, and its compilation."""

from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from fullstride.errors import ConfigError, one_of
from fullstride.step.jax.loss import describe, split_key
from fullstride.step.jax.metrics import gathered
from fullstride.step.jax.parts import (
    Part,
    Recipes,
    beside,
    changed,
    filter_of,
    joined,
    part_of,
    parts_of,
    reported,
    start,
)
from fullstride.step.jax.retrace import RetraceWatch
from fullstride.step.jax.state import Blueprint, State
from fullstride.step.jax.trainable import checked_like, partitioned
from fullstride.step.jax.trees.ownership import copied, is_committed, private, strongly_typed
from fullstride.step.jax.trees.structure import Structure, split
from fullstride.step.jax.update import StepCarry, differentiate

LAYOUTS = ("flat", "grouped")


class StepProgram:
    """One model's step: pure functions of flat buffers, compiled by `jax.jit`.

    Attributes:
        blueprint: structures that its states share.
        parts: what it does, one after another.
        leaves: shapes, dtypes and shardings of a state's leaves.
        jitted: the compiled function of (buffers, fixed, batch, key).

    """

    def __init__(
        self,
        recipes: Recipes,
        model: Any,
        nn_state: Any,
        wrt: Any,
        layout: str,
        donate: bool,
        steps: int,
        retraces: RetraceWatch,
    ):
        one_of("layout", layout, LAYOUTS)
        self.recipes = recipes
        self.steps = steps
        self.retraces = retraces
        self.wrt, self.sharding = filter_of(recipes, wrt, model), next(iter(recipes.values())).sharding
        structure, params, fixed = partitioned(model, self.wrt)
        carry = eqx.filter_eval_shape(partial(start, recipes), params, _arrays(nn_state))
        shape, (leaves,) = split(carry, lambda x: isinstance(x, jax.ShapeDtypeStruct))
        trainable = len(jax.tree.leaves(params))
        spread = self.sharding
        self.leaves = tuple(
            jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=spread and NamedSharding(spread.mesh, spread.rule(name, x.shape))
            )
            for name, x in zip(shape.names(), leaves, strict=True)
        )
        self.fixed = tuple(map(self._copied, fixed))
        self.parts = parts_of(recipes, shape, self.leaves, layout == "grouped")
        self.blueprint = Blueprint(structure, shape, joined(self.parts, len(leaves), trainable), trainable)
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

    def start(self, model: Any, nn_state: Any, opt_state: Any = None, ema_model: Any = None, count: int = 0) -> State:
        """Return a state before its next step, made of copies; what is None is as before the first step.

        Raises:
            ConfigError: for trees of another structure, shape or dtype than the program's.

        """
        structure, params, fixed = partitioned(model, self.wrt)
        self._check_model(structure, [*jax.tree.leaves(params), *fixed])
        carry = start(self.recipes, params, _arrays(nn_state))
        carry = carry._replace(taken=jax.tree.map(lambda x: jnp.full_like(x, count), carry.taken))
        if opt_state is not None:
            carry = carry._replace(opt_state=_arrays(opt_state))
        if ema_model is not None:
            carry = carry._replace(ema=self._average(ema_model, carry.ema))
        shape, (leaves,) = split(carry, lambda x: eqx.is_array(x) or isinstance(x, jax.ShapeDtypeStruct))
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves):
            raise ConfigError("nn_state or opt_state: it holds shapes instead of arrays; give init() the arrays")
        kept = "its state or of the parameters; expected those of this model and optimizer"
        checked_like(shape, leaves, self.blueprint.carry, self.leaves, "init()", kept)
        return self.state([copied(x) for x in leaves], tuple(map(strongly_typed, fixed)), count)

    def _average(self, model: Any, like: Any) -> Any:
        if like is None:
            raise ConfigError("ema_model: this step keeps no average; build it with ema=")
        structure, params, fixed = partitioned(model, self.wrt)
        self._check_model(structure, [*jax.tree.leaves(params), *fixed])
        if None not in self.recipes:
            params = {name: params[name] for name in like}
        return jax.tree.map(lambda p, a: p.astype(a.dtype), params, like)

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
        found = {}
        for part in self.parts:
            buffers, found[part.name] = self._advance(part, rest, list(buffers), given)
        return tuple(buffers), reported(found)

    def _advance(self, part: Part, rest: Any, buffers: list[Any], given: Any) -> tuple[list[Any], dict[str, Any]]:
        blueprint, recipe = self.blueprint, part.recipe
        batch, key = given
        carry: StepCarry = blueprint.carry.build(blueprint.layout.unpack(buffers))
        own = part_of(carry, part.name)
        if part.name is not None:
            recipe, rest = beside(recipe, part.name, carry.params, rest), rest[part.name]
        grads, loss, aux, nn_state = differentiate(recipe, own.params, rest, batch, key, own.scale, carry.nn_state)
        flat, shape = jax.tree.flatten(grads)
        if self.sharding is not None:
            kinds = [self.leaves[i] for i in part.leaves[: part.trainable]]
            flat = [jax.lax.with_sharding_constraint(g, kind.sharding) for g, kind in zip(flat, kinds, strict=True)]
        change = partial(changed, part.recipe, part.carry, shape)
        new, report = part.layout.update(change, [buffers[i] for i in part.buffers], flat, loss)
        for i, buffer in zip(part.buffers, new, strict=True):
            buffers[i] = buffer
        arrays = [x for x in jax.tree.leaves(nn_state) if eqx.is_array(x)]
        for i, x in enumerate(arrays, len(buffers) - len(arrays)):
            buffers[i] = jnp.where(report["skipped"], buffers[i], x) if "skipped" in report else x
        return buffers, gathered(loss, aux, report)


def _arrays(nn_state: Any) -> Any:
    """The state with JAX's arrays in place of NumPy's."""
    return jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray | np.generic) else x, private(nn_state))
