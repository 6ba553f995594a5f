"""TrainStep: an Equinox training step that costs the host what `jax.jit` costs on a flat list of buffers."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np

from fullstride.errors import ConfigError
from fullstride.step.jax.compile_report import CompileReport
from fullstride.step.jax.loss import LossFn, describe
from fullstride.step.jax.metrics import NOTHING_YET, Metrics
from fullstride.step.jax.nnx import nnx_models, require_none
from fullstride.step.jax.parts import recipes_of
from fullstride.step.jax.precision import Precision, precision_of
from fullstride.step.jax.program import StepProgram
from fullstride.step.jax.retrace import RetraceWatch, listed
from fullstride.step.jax.sharding import Sharding
from fullstride.step.jax.state import State
from fullstride.step.jax.step_timing import Pace, Stopwatch
from fullstride.step.jax.trees.ownership import device_of, is_deleted, private
from fullstride.step.jax.update import Ema, StepRecipe, require_count
from fullstride.step.jax.watch import RunningSteps, silence_callbacks, translated


class TrainStep:
    """`state, metrics = step(state, batch, key)`: partitioned once, leaves held flat, buffers donated, never waiting.

    `loss_fn(model, batch, key)` returns a scalar loss, or the pair of it and aux: a dict's entries become metrics.
    With `nn_state` it is `loss_fn(model, nn_state, batch, key)`, and returns (loss, nn_state) or (loss, nn_state, aux).
    Several models are a dict, with a dict of losses and one of optimizers by the model that each trains: each loss is
    given every model, one after another in the losses' order, and differentiated with respect to its own.
    A loss or a metric over a number that varies, such as tokens, is a `Mean`, so that it is exact when accumulated.
    The metrics that a call returns are those of the step before. What `equinox.error_if` or a loss that is not finite
    has to say is raised by the first call after the step is done, once it has sent its own step off, so that looking
    takes no time; `finish` waits for all of it.
    """

    def __init__(
        self,
        loss_fn: LossFn | Mapping[str, LossFn],
        optimizer: Any,
        model: Any,
        *,
        nn_state: Any = None,
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
        steps_per_call: int = 1,
        sharding: Sharding | None = None,
    ):
        """Take the model apart; nothing is computed or compiled yet.

        Args:
            loss_fn: function of (model, batch, key), or a dict of them; metrics are then named `model/loss`.
            optimizer: an optax transformation of gradients, parameters and, as `value` if it takes that, the loss; or
                a dict of them.
            model: any pytree, usually an `equinox.Module`; it stays as it is, and `init` starts from it. A loss may
                change the other state of a `flax.nnx.Module`; its optimizer is optax's or an `nnx.Optimizer`, and
                `state.write_to(model, optimizer)` writes back.
            nn_state: what the loss reads and rewrites without a gradient, usually an `equinox.nn.State`, or any pytree,
                such as a target network. It keeps its dtypes, is passed from one micro-batch to the next, and stays as
                it was in a step that is skipped.
            wrt: which leaves are trained, a filter as `equinox.partition` takes it; of a `flax.nnx.Module` as
                `flax.nnx.split` does, by default `nnx.Param`.
            accumulate: micro-batches of a step; the first axis of every leaf of the batch is divided by it.
            precision: `fp32`, `bf16`, `fp16`, or a `Precision`. Parameters and state keep their own dtypes.
            ema: decay of an average of the parameters, or a function from the step's number (an array) to it.
            donate: give a state's buffers to the next state. Without it states can be kept, at twice the memory.
            has_aux: whether loss_fn returns a pair; None looks.
            grad_norm: report the gradients' global norm.
            skip_nonfinite: leave the state alone in a step whose gradients are not finite; dynamic loss scaling does.
            check_finite: raise for a loss that is not finite, unless such steps are skipped.
            on_retrace: `warn`, `raise` or `ignore` when the step is traced again.
            steps_per_call: steps in one call; every leaf of the batch then has as many batches along its first axis,
                the key is split, and the metrics have an entry for each.
            sharding: `data_parallel()`, `fsdp()` or a `Sharding` of one's own; the batch is divided over its devices.
            layout: `flat`, one buffer for each leaf, or `grouped`, leaves of one shape and treatment in one buffer.

        Raises:
            ConfigError: naming the argument that cannot be.

        """
        numbers = precision_of(precision)
        self._model, self._nn_state = model, nn_state
        nnx = nnx_models(model, optimizer, wrt)
        if nnx is not None:
            require_none(nn_state)
            (model, nn_state), wrt = nnx.split(model), True
            loss_fn, optimizer = nnx.loss(loss_fn, has_aux), nnx.transformation(optimizer)
            has_aux = True
        settings = numbers, accumulate, ema, has_aux, grad_norm, skip_nonfinite, sharding
        recipes = recipes_of(loss_fn, optimizer, model, lambda loss, tx: StepRecipe(loss, tx, *settings))
        require_count("steps_per_call", steps_per_call)
        self.steps_per_call, self.sharding = steps_per_call, sharding
        self.retraces, self.stopwatch = RetraceWatch(on_retrace), Stopwatch()
        self.watch = RunningSteps(check_finite and not skip_nonfinite and numbers.dynamic is None)
        self.program = StepProgram(recipes, model, nn_state, wrt, layout, donate, steps_per_call, self.retraces)
        self.program.blueprint.nnx = nnx
        self._late = NOTHING_YET
        silence_callbacks()

    def init(
        self, model: Any = None, *, nn_state: Any = None, opt_state: Any = None, ema_model: Any = None, step: int = 0
    ) -> State:
        """Return a state before its first step here, from these or the constructor's; its arrays are copies.

        Args:
            model: of the same structure, shapes and dtypes as at construction.
            nn_state: the same.
            opt_state: optax's, as a loop or a checkpoint of the user's own has it; None starts anew.
            ema_model: average of the model's parameters; None starts from the model.
            step: steps that were taken; by default those that an `nnx.Optimizer` has counted.

        Raises:
            ConfigError: for trees of another structure, shape or dtype.

        """
        model = self._model if model is None else model
        if (nnx := self.program.blueprint.nnx) is not None:
            require_none(nn_state)
            (model, nn_state), step = nnx.split(model), step or nnx.taken()
        nn_state = self._nn_state if nn_state is None else nn_state
        return self.program.start(model, nn_state, opt_state, ema_model, step)

    def __call__(self, state: State | Any, batch: Any, key: Any = None) -> tuple[State, Metrics]:
        """Dispatch one step.

        Args:
            state: from `init` or the previous call; if the step donates, it cannot be used again.
            batch: a pytree of arrays, on the host or the device.
            key: random key for loss_fn; split into one per micro-batch if gradients are accumulated.

        Returns:
            The new state, and the metrics of the step that returned the old one: empty if none did, as at a run's
            first call.

        Raises:
            ConfigError: for a state that is none of this step's or was donated, a batch that holds other than arrays.
            EquinoxRuntimeError: from an earlier step's `equinox.error_if`.
            FloatingPointError: for an earlier step's loss.

        """
        started, traces = time.perf_counter(), self.retraces.count
        if type(state) is not State or state.blueprint is not self.program.blueprint:
            state = self._own_state(state)
        number = state.step + self.steps_per_call
        batch, key = private((batch, key))
        try:
            if self.sharding is not None:
                batch = self.sharding.put(batch, int(self.steps_per_call > 1))
            if state.fresh:
                state.settle(batch, key)
            buffers, arrays = self.program.jitted(state.buffers, state.fixed, batch, key)
        except Exception as error:
            raise self._explained(error, state, batch, key, number) from None
        # Behind the step: what the host looks at here takes no time while the device works.
        self.watch.poll()
        self.watch.add(number, arrays["loss"])
        self._late = Metrics(number, arrays)
        self.stopwatch.lap(started, self.watch.busy(), self.retraces.count == traces)
        # With the state, as another run's last step is not the one before.
        return State(buffers, state.fixed, self.program.blueprint, number, False, self._late), state.late

    def compile(self, batch: Any, key: Any = None) -> CompileReport:
        """Compile ahead of time for batches like this one, of arrays or `jax.ShapeDtypeStruct`.

        Calls then start at once. Nothing is allocated or run, so that a step's memory and operations can be known
        before there is a model.
        """
        started = time.perf_counter()
        if self.sharding is None:
            state = self.program.abstract(device_of((self._model, batch, key)))
        else:
            state, batch = self.program.abstract(), self.sharding.kinds(batch, int(self.steps_per_call > 1))
        lowered = self.program.jitted.lower(state.buffers, state.fixed, batch, key)
        traced = time.perf_counter()
        executable = lowered.compile()
        return CompileReport.of(executable, traced - started, time.perf_counter() - traced)

    def finish(self) -> Metrics:
        """Wait for every dispatched step, raise their errors, and return the last one's metrics."""
        self.watch.drain()
        return self._late

    def report(self) -> Pace:
        """Report the split of time between host and device since the last report: `host 1.8 of 15.9 ms, hidden`."""
        return self.stopwatch.report()

    @contextmanager
    def profile(self, folder: str | Path) -> Iterator[None]:
        """Record what runs inside to `folder`, for TensorBoard or Perfetto; each call is marked with its step."""
        compiled = self.program.jitted

        def annotated(buffers: Any, *arguments: Any) -> Any:
            with jax.profiler.StepTraceAnnotation("train", step_num=self._late.step + self.steps_per_call):
                return compiled(buffers, *arguments)

        with jax.profiler.trace(str(folder)):
            self.program.jitted = annotated
            try:
                yield
                self.finish()
            finally:
                self.program.jitted = compiled

    @property
    def traces(self) -> int:
        """Number of traces of the step: 1 as long as shapes and dtypes stay the same."""
        return self.retraces.count

    def _own_state(self, state: Any) -> State:
        if type(state) is not State:
            raise ConfigError(f"state is {describe(state)}; expected a State: state, metrics = step(state, batch, key)")
        if not state.blueprint.same_as(self.program.blueprint):
            raise ConfigError("state: it belongs to a step of another model, optimizer or layout; start with init()")
        return State(state.buffers, state.fixed, self.program.blueprint, state.step, state.fresh, state.late)

    def _explained(self, error: Exception, state: State, batch: Any, key: Any, number: int) -> Exception:
        if (earlier := self.watch.trouble()) is not None:
            return earlier
        if "deleted" in str(error) and is_deleted(state.buffers):
            return state.donated()
        for path, leaf in jax.tree_util.tree_leaves_with_path({"batch": batch, "key": key}):
            if not isinstance(leaf, jax.Array | np.ndarray | np.generic | int | float | complex):
                name = jax.tree_util.keystr(path[:1], simple=True) + jax.tree_util.keystr(path[1:])
                return ConfigError(f"{name} is a {type(leaf).__name__}; expected arrays or numbers")
        if isinstance(error, TypeError | ValueError) and not isinstance(error, ConfigError):
            error.add_note(f"The step was called with {listed(batch=batch, key=key)}.")
            if (count := self.program.parts[0].recipe.accumulate) > 1:
                error.add_note(
                    f"accumulate={count} divides the first axis of every array; give a batch whose arrays hold the "
                    "sizes of their axes, such as haliax.NamedArray, as plain arrays."
                )
        return translated(error, f" (step {number})")
