"""TrainStep: an Equinox training step that costs the host what `jax.jit` costs on a flat list of buffers."""

import time
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from fullstride.errors import ConfigError, one_of
from fullstride.step.jax.compiled import Compiled
from fullstride.step.jax.grouping import grouped_layout
from fullstride.step.jax.layout import Flat
from fullstride.step.jax.loss import LossFn, describe
from fullstride.step.jax.metrics import Metrics, gathered
from fullstride.step.jax.pace import Pace, Stopwatch
from fullstride.step.jax.precision import Precision, precision_of
from fullstride.step.jax.retrace import Retraces
from fullstride.step.jax.state import Blueprint, State
from fullstride.step.jax.structure import split
from fullstride.step.jax.trainable import checked_like, partitioned
from fullstride.step.jax.update import Ema, Recipe, differentiate, update
from fullstride.step.jax.watch import Watch, silence_callbacks, translated

LAYOUTS = ("flat", "grouped")


class TrainStep:
    """`state, metrics = step(state, batch, key)`: partitioned once, leaves held flat, buffers donated, never waiting.

    `loss_fn(model, batch, key)` returns a scalar loss, or the pair of it and aux: a dict's entries become metrics.
    The metrics that a call returns are those of the step before. What `equinox.error_if` or a loss that is not finite
    has to say is raised by the first call after the step is done; `finish` waits for all of it.
    """

    def __init__(
        self,
        loss_fn: LossFn,
        optimizer: optax.GradientTransformation,
        model: Any,
        *,
        wrt: Any = eqx.is_inexact_array,
        accumulate: int = 1,
        precision: str | Precision = "fp32",
        ema: Ema = None,
        donate: bool = True,
        has_aux: bool | None = None,
        grad_norm: bool = False,
        skip_nonfinite: bool = False,
        check_finite: bool = True,
        on_retrace: str = "warn",
        layout: str = "flat",
    ):
        """Take the model apart; nothing is computed or compiled yet.

        Args:
            loss_fn: function of (model, batch, key).
            optimizer: any optax transformation; it gets the loss as `value`.
            model: any pytree, usually an `equinox.Module`; it stays as it is, and `init` starts from it.
            wrt: which leaves are trained, a filter as `equinox.partition` takes it.
            accumulate: micro-batches of a step; the first axis of every leaf of the batch is divided by it.
            precision: `fp32`, `bf16`, `fp16`, or a `Precision`. Parameters and state keep their own dtypes.
            ema: decay of an average of the parameters, or a function from the step's number (an array) to it.
            donate: give a state's buffers to the next state. Without it states can be kept, at twice the memory.
            has_aux: whether loss_fn returns a pair; None looks.
            grad_norm: report the gradients' global norm.
            skip_nonfinite: leave the state alone in a step whose gradients are not finite; dynamic loss scaling does.
            check_finite: raise for a loss that is not finite, unless such steps are skipped.
            on_retrace: `warn`, `raise` or `ignore` when the step is traced again.
            layout: `flat`, one buffer for each leaf, or `grouped`, leaves of one shape and treatment in one buffer.

        Raises:
            ConfigError: naming the argument that cannot be.

        """
        one_of("layout", layout, LAYOUTS)
        numbers = precision_of(precision)
        self.recipe = Recipe(loss_fn, optimizer, numbers, accumulate, ema, has_aux, grad_norm, skip_nonfinite)
        self.wrt, self.donate, self._model = wrt, donate, model
        self.retraces, self.stopwatch = Retraces(on_retrace), Stopwatch()
        self.watch = Watch(check_finite and not skip_nonfinite and numbers.dynamic is None)
        self.blueprint, self._abstract = self._drawn(model, layout)
        self._compiled = jax.jit(self._traced, donate_argnums=(0,) if donate else ())
        self._late = Metrics(0, {})
        silence_callbacks()

    def _drawn(self, model: Any, layout: str) -> tuple[Blueprint, tuple[Any, ...]]:
        structure, params, _ = partitioned(model, self.wrt)
        carry = eqx.filter_eval_shape(self.recipe.start, params)
        shape, (leaves,) = split(carry, lambda x: isinstance(x, jax.ShapeDtypeStruct))
        blueprint = Blueprint(structure, shape, Flat(), len(jax.tree.leaves(params)))
        if layout == "grouped":
            change = partial(changed, self.recipe, blueprint, jax.tree.structure(params))
            loss = jax.ShapeDtypeStruct((), jnp.float32)
            blueprint.layout = grouped_layout(shape.paths(), leaves, blueprint.trainable, change, loss)
        return blueprint, leaves

    def init(self, model: Any = None) -> State:
        """A state before the first step, from the model given here or at construction; its arrays are copies.

        Raises:
            ConfigError: for a model of another structure, shape or dtype than at construction.

        """
        structure, params, fixed = partitioned(self._model if model is None else model, self.wrt)
        if structure is not self.blueprint.model:
            raise ConfigError("model: its structure is not that of the model of this step; build another step for it")
        shape, (leaves,) = split(self.recipe.start(params), eqx.is_array)
        checked_like(shape, leaves, self.blueprint.carry, self._abstract)
        buffers = self.blueprint.layout.pack([_owned(x) for x in leaves])
        return State(buffers, tuple(jnp.asarray(x) for x in fixed), self.blueprint, 0)

    def __call__(self, state: State | Any, batch: Any, key: Any = None) -> tuple[State, Metrics]:
        """Send one step off.

        Args:
            state: from `init` or the call before; where the step donates, it cannot be used again.
            batch: a pytree of arrays, on the host or the device.
            key: what loss_fn gets as its key; split into one for each micro-batch where gradients are accumulated.

        Returns:
            The new state, and the metrics of the step before: empty at the first call.

        Raises:
            ConfigError: for a state that is none of this step's or was donated, a batch that holds other than arrays.
            EquinoxRuntimeError: from an earlier step's `equinox.error_if`.
            FloatingPointError: for an earlier step's loss.

        """
        started, traces = time.perf_counter(), self.retraces.count
        self.watch.poll()
        if type(state) is not State or state.blueprint is not self.blueprint:
            state = self._own_state(state)
        number = state.step + 1
        try:
            buffers, arrays = self._compiled(state.buffers, state.fixed, batch, key)
        except Exception as error:
            raise self._explained(error, state, batch, key, number) from None
        self.watch.add(number, arrays["loss"])
        late, self._late = self._late, Metrics(number, arrays)
        self.stopwatch.lap(started, self.watch.busy(), self.retraces.count == traces)
        return State(buffers, state.fixed, self.blueprint, number), late

    def abstract(self) -> State:
        """A state of shapes and dtypes alone."""
        _, _, fixed = partitioned(self._model, self.wrt)
        buffers = jax.eval_shape(self.blueprint.layout.pack, list(self._abstract))
        return State(buffers, tuple(jax.eval_shape(jnp.asarray, x) for x in fixed), self.blueprint, 0)

    def compile(self, batch: Any, key: Any = None) -> Compiled:
        """Compile ahead of time for batches like this one, of arrays or `jax.ShapeDtypeStruct`.

        Calls then start at once. Nothing is allocated or run, so that a step's memory and operations can be known
        before there is a model.
        """
        state, started = self.abstract(), time.perf_counter()
        lowered = self._compiled.lower(state.buffers, state.fixed, batch, key)
        traced = time.perf_counter()
        executable = lowered.compile()
        return Compiled.of(executable, traced - started, time.perf_counter() - traced)

    def finish(self) -> Metrics:
        """Wait for every step that was sent off, raise what they have to say, and return the last one's metrics."""
        self.watch.drain()
        return self._late

    def report(self) -> Pace:
        """How time was split between host and device since the last report: `host 1.8 of 15.9 ms, hidden`."""
        return self.stopwatch.report()

    @property
    def traces(self) -> int:
        """How often the step was traced: 1 as long as shapes and dtypes stay the same."""
        return self.retraces.count

    def _traced(self, buffers: Any, fixed: Any, batch: Any, key: Any) -> tuple[Any, dict[str, Any]]:
        blueprint, recipe = self.blueprint, self.recipe
        leaves = blueprint.layout.unpack(buffers)
        carry = blueprint.carry.build(leaves)
        checked_like(blueprint.carry, leaves, blueprint.carry, self._abstract, "something outside of the step")
        self.retraces.note(batch=batch, key=key, fixed=fixed)
        grads, loss, aux = differentiate(recipe, carry.params, blueprint.rest(fixed), batch, key, carry.scale)
        flat, shape = jax.tree.flatten(grads)
        change = partial(changed, recipe, blueprint, shape)
        buffers, report = blueprint.layout.update(change, buffers, flat, loss)
        return buffers, gathered(loss, aux, report)

    def _own_state(self, state: Any) -> State:
        if type(state) is not State:
            raise ConfigError(f"state is {describe(state)}; expected a State: state, metrics = step(state, batch, key)")
        if not state.blueprint.same_as(self.blueprint):
            raise ConfigError("state: it belongs to a step of another model, optimizer or layout; start with init()")
        return State(state.buffers, state.fixed, self.blueprint, state.step)

    def _explained(self, error: Exception, state: State, batch: Any, key: Any, number: int) -> Exception:
        if isinstance(error, RuntimeError | ValueError) and "deleted" in str(error):
            return ConfigError(
                f"state: that of step {number - 1} was donated to an earlier call; use the state which that call "
                "returned, or build the step with donate=False"
            )
        for path, leaf in jax.tree_util.tree_leaves_with_path({"batch": batch, "key": key}):
            if not isinstance(leaf, jax.Array | np.ndarray | np.generic | int | float | complex):
                name = jax.tree_util.keystr(path[:1], simple=True) + jax.tree_util.keystr(path[1:])
                return ConfigError(f"{name} is a {type(leaf).__name__}; expected arrays or numbers")
        return translated(error, f" (step {number})")


def changed(
    recipe: Recipe, blueprint: Blueprint, shape: Any, leaves: Any, grads: Any, loss: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The update on flat leaves: the new ones, and the report."""
    carry = blueprint.carry.build(leaves)
    new, report = update(recipe, carry, jax.tree.unflatten(shape, grads), loss)
    structure, (found,) = split(new, eqx.is_array)
    checked_like(structure, found, blueprint.carry, leaves)
    # A weak type would have the next step traced again.
    return tuple(jax.lax.convert_element_type(x, x.dtype) for x in found), report


def _owned(x: Any) -> Any:
    """A copy that is nobody else's, without a weak type."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(jnp.copy(jax.random.key_data(x)), impl=jax.random.key_impl(x))
    return jax.lax.convert_element_type(jnp.array(x, copy=True), x.dtype)
