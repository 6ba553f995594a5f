"""Steps in the style `model, optimizer, aux = train_step(model, optimizer, batch, key)`."""

import time
from dataclasses import dataclass
from sys import getrefcount
from typing import Any

import equinox as eqx
import jax
import optax

from fullstride.errors import ConfigError
from fullstride.step.jax.cached_jit import CompiledCore, named
from fullstride.step.jax.loss import LossFn
from fullstride.step.jax.precision import Precision, precision_of
from fullstride.step.jax.retrace import RetraceWatch
from fullstride.step.jax.step_timing import Pace, Stopwatch
from fullstride.step.jax.trainable import partitioned
from fullstride.step.jax.trees.arguments import SpareModules, read
from fullstride.step.jax.trees.ownership import apart, is_deleted, private, settled
from fullstride.step.jax.update import StepRecipe, Transformation, differentiate, optimized
from fullstride.step.jax.watch import RunningSteps, silence_callbacks, translated


@dataclass(frozen=True)
class Filter:
    """A tree of functions and booleans, with the hash that a list or dict in it would not have."""

    treedef: Any
    leaves: tuple[Any, ...]

    @classmethod
    def of(cls, wrt: Any) -> "Filter":
        """Take a filter apart."""
        leaves, treedef = jax.tree.flatten(wrt)
        return cls(treedef, tuple(leaves))

    @property
    def tree(self) -> Any:
        """Filter as a tree."""
        return jax.tree.unflatten(self.treedef, self.leaves)


class Optimizer(eqx.Module):
    """`model, optimizer = optimizer(grads, model)`: the state is a tree of arrays, all the rest is static.

    Attributes:
        opt_state: optax's state.
        tx: the transformation.
        wrt: which leaves of a model are trained; its `tree` is a filter as `equinox.filter` takes it.

    """

    opt_state: Any
    tx: Transformation = eqx.field(static=True)
    wrt: Filter = eqx.field(static=True)

    @classmethod
    def create(cls, tx: Transformation, model: Any, wrt: Any = eqx.is_inexact_array) -> "Optimizer":
        """Make the optimizer of a model before the first step.

        Raises:
            ConfigError: if no leaf is trained, or a trained leaf has no gradient.

        """
        _, params, _ = partitioned(model, wrt)
        with jax.numpy_dtype_promotion("standard"):
            return cls(tx.init(params), tx, Filter.of(wrt))

    def __call__(self, grads: Any, model: Any, loss: Any = None) -> tuple[Any, "Optimizer"]:
        """Update and return model and optimizer; transformations that take the loss get it as `value`."""
        params, opt_state = optimized(self.tx, eqx.filter(model, self.wrt.tree), self.opt_state, grads, loss)
        return eqx.combine(params, model), Optimizer(opt_state, self.tx, self.wrt)


class CallStyleStep:
    """Train step that `make_train_step` returns.

    Attributes:
        loss: of the last call, on the device; None before the first.
        retraces: counts traces and names what changed.
        watch: the losses of steps that may still be running.

    """

    def __init__(self, settings: dict[str, Any], donate: bool, check_finite: bool, on_retrace: str):
        self.settings = settings
        self.loss: Any = None
        self.retraces = RetraceWatch(on_retrace)
        self.watch = RunningSteps(check_finite)
        self.stopwatch = Stopwatch()
        self._own = read(self._body)
        self._core = CompiledCore("train_step", "all-except-first" if donate else "none", {})
        self._calls = 0
        silence_callbacks()

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Make one step: from (model, optimizer, batch, key=None) the new (model, optimizer, aux).

        What an earlier step's `equinox.error_if` or loss has to say is raised here, once that step is done and this
        one is sent off.
        """
        started, traces = time.perf_counter(), self.retraces.count
        holders = tuple(map(getrefcount, args))
        model, optimizer, batch, key = _named(*args, **kwargs)
        trained = read(((model, optimizer), {}))
        if not trained.modules or any(record.shells is None for _, record, _ in trained.modules):
            # Arrays that a user put together may lie at two places, be weak, uncommitted or NumPy's.
            groups = settled(apart(private(trained.groups)), (batch, key))
            trained = trained._replace(groups=groups, on_host=False)
        spare = SpareModules(trained, args[:2], holders[:2])
        self._calls += 1
        result = self._sent((self._own, read(((batch, key),)), trained))
        model, optimizer, aux, self.loss = result.tree(spare)
        # Behind the step, where looking takes no time while the device works.
        self.watch.poll()
        self.watch.add(self._calls, self.loss)
        self.stopwatch.lap(started, self.watch.busy(), self.retraces.count == traces)
        return model, optimizer, aux

    def __repr__(self) -> str:
        return f"make_train_step({named(self.settings['loss_fn'])})"

    def _sent(self, given: Any) -> Any:
        donated, kept, program = self._core.prepared(given)
        try:
            return self._core.jitted(donated, kept, program)
        except (jax.errors.JaxRuntimeError, ValueError, RuntimeError) as error:
            if (earlier := self.watch.trouble()) is not None:
                raise earlier from None
            if "deleted" in str(error) and is_deleted(jax.tree.leaves(given[2].groups)):
                raise ConfigError(
                    "model or optimizer: its arrays were donated to an earlier call; use the model and optimizer "
                    "that it returned, or make_train_step(..., donate=False)"
                ) from None
            raise translated(error, f" (step {self._calls})") from None

    def finish(self) -> None:
        """Wait for every dispatched step, and raise their errors."""
        self.watch.drain()

    def report(self) -> Pace:
        """Report how time was split between host and device since the last report."""
        return self.stopwatch.report()

    @property
    def traces(self) -> int:
        """Number of traces of the step."""
        return self.retraces.count

    def _body(self, given: tuple[Any, Any], model: Any, optimizer: Optimizer) -> tuple[Any, Optimizer, Any, Any]:
        batch, key = given
        with self.retraces.tracing(batch=batch, key=key, model=model, optimizer=optimizer):
            recipe = StepRecipe(optimizer=optimizer.tx, **self.settings)
            params, rest = eqx.partition(model, optimizer.wrt.tree)
            grads, loss, aux, _ = differentiate(recipe, params, rest, batch, key)
            model, optimizer = optimizer(grads, model, loss)
            return model, optimizer, loss if aux is None else aux, loss


def _named(model: Any, optimizer: Any, batch: Any, key: Any = None) -> tuple[Any, Any, Any, Any]:
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(f"optimizer is a {type(optimizer).__name__}; expected Optimizer.create(tx, model)")
    return model, optimizer, batch, key


def make_train_step(
    loss_fn: LossFn,
    *,
    has_aux: bool | None = None,
    accumulate: int = 1,
    precision: str | Precision = "fp32",
    donate: bool = True,
    check_finite: bool = True,
    on_retrace: str = "warn",
) -> CallStyleStep:
    """Make a step `model, optimizer, aux = train_step(model, optimizer, batch, key)` for an `Optimizer`.

    aux is the second result of loss_fn, or the loss itself, which is also `train_step.loss`. Donated models
    and optimizers cannot be used again, and are refilled unless someone else holds them.

    Args:
        loss_fn: (model, batch, key) -> loss, a scalar, or (loss, aux).
        has_aux: whether it returns aux; None finds out.
        accumulate: micro-batches of a step; the first axis of every leaf of the batch is divided by it.
        precision: `fp32`, `bf16`, or a `Precision`. Parameters and state keep their own dtypes.
        donate: whether the buffers of model and optimizer become those of their successors.
        check_finite: whether a loss that is not finite raises.
        on_retrace: `warn`, `raise` or `ignore`, when other shapes or static fields make it trace again.

    Returns:
        The step; it raises what `equinox.error_if` found in an earlier call by its message.

    Raises:
        ConfigError: for a setting that cannot be; dynamic loss scaling has a state, which `TrainStep` keeps.

    """
    numbers = precision_of(precision)
    if numbers.dynamic is not None:
        raise ConfigError(f"precision={precision}: dynamic loss scaling needs a TrainStep, which keeps the scale")
    settings = {"loss_fn": loss_fn, "precision": numbers, "accumulate": accumulate, "has_aux": has_aux}
    StepRecipe(optimizer=optax.identity(), **settings)
    return CallStyleStep(settings, donate, check_finite, on_retrace)
