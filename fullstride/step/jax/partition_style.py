"""Explicit form of a step: the model is partitioned once, and the caller threads flat tuples of arrays."""

from typing import Any

import equinox as eqx
import jax

from fullstride.errors import ConfigError
from fullstride.step.jax.loss import LossFn
from fullstride.step.jax.precision import Precision, precision_of
from fullstride.step.jax.trainable import partitioned
from fullstride.step.jax.trees.ownership import are_numpys, copied, private
from fullstride.step.jax.trees.structure import split
from fullstride.step.jax.update import StepRecipe, Transformation, differentiate, optimized


class PartitionedStep:
    """`params, opt_state, aux = step(params, opt_state, batch, key)` on flat tuples of arrays, through `jax.jit` alone.

    Attributes:
        jitted: the compiled function itself; it returns the loss and aux apart.
        loss: of the last call, on the device; None before the first.
        params: the model's trainable arrays before the first step, copies.
        opt_state: the arrays of the optimizer's state before the first step.

    """

    def __init__(self, recipe: StepRecipe, model: Any, wrt: Any, donate: bool):
        self.recipe = recipe
        self.loss: Any = None
        self._model, params, self._fixed = partitioned(model, wrt)
        start = jax.tree.map(copied, recipe.start(params))
        self._shape, (self.params,) = split(start.params)
        self._state, (self.opt_state,) = split(start.opt_state)
        self.jitted: Any = jax.jit(self._step, donate_argnums=(0, 1) if donate else ())

    def __call__(self, params: Any, opt_state: Any, batch: Any, key: Any = None) -> tuple[Any, Any, Any]:
        # They are many, and as a rule the step's own: to flatten them anew would cost a third of the dispatch.
        if are_numpys((*params, *opt_state)):
            params, opt_state = private((params, opt_state))
        params, opt_state, self.loss, aux = self.jitted(params, opt_state, *private((batch, key)))
        return params, opt_state, self.loss if aux is None else aux

    def combine(self, params: Any) -> Any:
        """Return the model with these parameters."""
        return self._model.build(params, self._fixed)

    def combine_state(self, opt_state: Any) -> Any:
        """Return the optimizer's state in optax's structure."""
        return self._state.build(opt_state)

    def _step(self, params: Any, opt_state: Any, batch: Any, key: Any) -> tuple[Any, Any, Any, Any]:
        model, rest = self._shape.build(params), self._model.build((None,) * len(params), self._fixed)
        grads, loss, aux, _ = differentiate(self.recipe, model, rest, batch, key)
        trees = optimized(self.recipe.optimizer, model, self.combine_state(opt_state), grads, loss)
        (_, (params,)), (_, (opt_state,)) = (split(tree) for tree in trees)
        return params, opt_state, loss, aux


def make_train_step_with_partition(
    loss_fn: LossFn,
    optimizer: Transformation,
    model: Any,
    *,
    wrt: Any = eqx.is_inexact_array,
    has_aux: bool | None = None,
    accumulate: int = 1,
    precision: str | Precision = "fp32",
    donate: bool = True,
) -> PartitionedStep:
    """Make a step in the explicit form: the model is partitioned here, the caller threads flat tuples of arrays.

    Nothing is watched: errors and losses that are not finite show when something is read.

    Args:
        loss_fn: (model, batch, key) -> loss, a scalar, or (loss, aux).
        optimizer: by optax.
        model: an Equinox module; its static part stays in the step.
        wrt: which of its arrays are trained.
        has_aux: whether loss_fn returns aux; None finds out.
        accumulate: micro-batches of a step; the first axis of every leaf of the batch is divided by it.
        precision: `fp32`, `bf16`, or a `Precision`. Parameters and state keep their own dtypes.
        donate: whether the buffers of parameters and optimizer become those of their successors.

    Returns:
        The step, (parameters, optimizer's state, batch, key) -> (parameters, optimizer's state, aux or loss), whose
        `combine` makes a model of the parameters. The loss is also its `loss`.

    Raises:
        ConfigError: for a setting that cannot be.

    """
    recipe = StepRecipe(loss_fn, optimizer, precision_of(precision), accumulate, has_aux=has_aux)
    if recipe.precision.dynamic is not None:
        raise ConfigError(f"precision={precision}: dynamic loss scaling needs a TrainStep, which keeps the scale")
    return PartitionedStep(recipe, model, wrt, donate)
