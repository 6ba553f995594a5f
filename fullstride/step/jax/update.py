"""Training step as a pure function of trees: loss, gradients, optimizer, averages of the weights."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from fullstride.errors import ConfigError
from fullstride.step.jax.loss import (
    LossFn,
    accumulated,
    describe,
    gradients,
    is_mean,
    parts_of_loss,
    parts_of_stateful_loss,
    values,
)
from fullstride.step.jax.precision import Precision, ScaleState, all_finite, wide
from fullstride.step.jax.sharding import Sharding
from fullstride.step.jax.trainable import checked_like
from fullstride.step.jax.trees.structure import split

Transformation = optax.GradientTransformation | optax.MultiSteps
# How Python, and optax by hand, say that an update lacks an argument.
NEEDS_MORE = ("required keyword-only argument", "must be provided")
Ema = float | Callable[[Int[Array, ""]], Float[Array, ""]] | None


class StepCarry(NamedTuple):
    """Values that a step reads and writes; of several models each field but `nn_state` is a dict by model.

    Attributes:
        params: the model with its trainable arrays, None elsewhere.
        opt_state: the optimizer's state.
        ema: exponential moving average of `params`, in fp32 if they are shorter; None without one.
        scale: state of dynamic loss scaling; None without it.
        taken: steps taken.
        nn_state: what the loss itself reads and rewrites, such as BatchNorm's statistics; None without it.

    """

    params: Any
    opt_state: Any
    ema: Any
    scale: Any
    taken: Any
    nn_state: Any = None


class _Kept(NamedTuple):
    """The state by its name, which messages say."""

    nn_state: Any


@dataclass(frozen=True)
class StepRecipe:
    """Definition of a step, complete when it is built; see `TrainStep` for the meanings."""

    loss_fn: LossFn
    optimizer: Transformation
    precision: Precision = field(default_factory=Precision)
    accumulate: int = 1
    ema: Ema = None
    has_aux: bool | None = None
    grad_norm: bool = False
    skip_nonfinite: bool = False
    sharding: Sharding | None = None

    def __post_init__(self) -> None:
        """Check the settings that do not depend on a model.

        Raises:
            ConfigError: with the name of the argument.

        """
        if not callable(self.loss_fn):
            raise ConfigError(f"loss_fn is {describe(self.loss_fn)}; expected a function of (model, batch, key)")
        if not all(callable(getattr(self.optimizer, name, None)) for name in ("init", "update")):
            raise ConfigError(f"optimizer is {describe(self.optimizer)}; expected optax's, such as optax.adamw(1e-3)")
        require_count("accumulate", self.accumulate)
        number = isinstance(self.ema, float | int) and 0 < self.ema < 1
        if not (self.ema is None or callable(self.ema) or number):
            raise ConfigError(f"ema={self.ema}: expected a decay between 0 and 1, or a function of the step")
        if not isinstance(self.sharding, Sharding | None):
            raise ConfigError(f"sharding is {describe(self.sharding)}; expected data_parallel(), fsdp() or a Sharding")

    def start(self, params: Any) -> StepCarry:
        """Return the carry before the first step."""
        # In bf16 the average would lose its increments, which are far below its last digit.
        ema = None if self.ema is None else jax.tree.map(lambda p: p.astype(wide(p.dtype)), params)
        with jax.numpy_dtype_promotion("standard"):
            opt_state = self.optimizer.init(params)
        scale = None
        if (dynamic := self.precision.dynamic) is not None:
            scale = ScaleState(jnp.asarray(dynamic.initial, jnp.float32), jnp.zeros((), jnp.int32))
        return StepCarry(params, opt_state, ema, scale, jnp.zeros((), jnp.int32))


def require_count(name: str, value: Any) -> None:
    """Check that a setting is an integer of 1 or more.

    Raises:
        ConfigError: if it is not.

    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name}={value}: expected an integer of 1 or more")


def differentiate(
    recipe: StepRecipe,
    params: Any,
    rest: Any,
    batch: Any,
    key: Any,
    scale: ScaleState | None = None,
    nn_state: Any = None,
) -> tuple[Any, Any, Any, Any]:
    """Compute gradients, loss, aux and the new state of a batch; `rest` is the model without its trainable arrays."""
    factor, cast = recipe.precision.factor(scale), recipe.precision.cast
    structure, (arrays,) = split(_Kept(nn_state), eqx.is_array)

    def objective(params: Any, batch: Any, key: Any, arrays: Any) -> tuple[Any, Any, Any, Any]:
        model = cast(eqx.combine(params, rest))
        if recipe.sharding is not None:
            # After the cast, so that less is sent.
            model = recipe.sharding.gathered(model)
        given = cast(batch) if recipe.precision.cast_batch else batch
        if nn_state is None:
            loss, aux = parts_of_loss(recipe.loss_fn(model, given, key), recipe.has_aux)
        else:
            out = recipe.loss_fn(model, structure.build(arrays).nn_state, given, key)
            loss, aux, new = parts_of_stateful_loss(out, recipe.has_aux)
            arrays = _kept(new, structure, arrays)
        value = values(loss)
        value = value.astype(wide(value.dtype))
        return value * jnp.asarray(factor, value.dtype), loss if is_mean(loss) else value, aux, arrays

    if recipe.accumulate == 1:
        grads, loss, aux, arrays = gradients(objective, params, batch, key, arrays)
    else:
        grads, loss, aux, arrays = accumulated(objective, recipe.accumulate, params, batch, key, arrays)
    if not (isinstance(factor, float) and factor == 1):
        # In fp16 a scale of 2^16 is infinite.
        grads = jax.tree.map(lambda g: (g.astype(w := wide(g.dtype)) / jnp.asarray(factor, w)).astype(g.dtype), grads)
    return grads, *values((loss, aux)), structure.build(arrays).nn_state


def _kept(nn_state: Any, structure: Any, before: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arrays of a state that a loss returned, checked against those it was given."""
    found, (arrays,) = split(_Kept(nn_state), eqx.is_array)
    checked_like(found, arrays, structure, before, "loss_fn", "nn_state, whose numbers that vary must be arrays")
    return tuple(jax.lax.convert_element_type(x, x.dtype) for x in arrays)


def optimized(optimizer: Any, params: Any, opt_state: Any, grads: Any, loss: Any) -> tuple[Any, Any]:
    """Apply one update to parameters and optimizer state; `loss`, unless None, is passed as `value` if it is taken.

    Raises:
        ConfigError: if the transformation needs other arguments, such as a function to evaluate the loss again.

    """
    apply = partial(optax.with_extra_args_support(optimizer).update, grads, opt_state, params)
    # Optax mixes dtypes even in Adam, so that it fails under strict promotion.
    with jax.numpy_dtype_promotion("standard"):
        try:
            updates, opt_state = apply() if loss is None else _given_loss(apply, loss)
        except (AttributeError, TypeError, ValueError) as error:
            raise _explained(error, opt_state, loss) from None
        return optax.apply_updates(params, updates), opt_state


def _given_loss(apply: Callable[..., Any], loss: Any) -> Any:
    try:
        return apply(value=loss)
    except TypeError as error:
        # What a chain or a wrapper holds does not show in its signature.
        if "unexpected keyword argument 'value'" not in str(error):
            raise
    return apply()


def _explained(error: Exception, opt_state: Any, loss: Any) -> Exception:
    """Explain an update that failed, if the reason is known; else return the error itself."""
    text = str(error)
    if any(words in text for words in NEEDS_MORE):
        given = "no loss" if loss is None else "the loss as value"
        return ConfigError(
            f"optimizer: its update was given gradients, parameters and {given}, and needs more ({error}); expected "
            "one that does with these: optimizer(grads, model, loss) gives the loss, and what evaluates it again, such "
            "as a line search, needs a step of your own, under cached_filter_jit"
        )
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, optax.LookaheadState))
    if any(isinstance(x, optax.LookaheadState) for x in nodes):
        return ConfigError(
            "optimizer: optax.lookahead trains a pair of fast and slow parameters (optax.LookaheadParams), of which a "
            "model is one; expected an optimizer of the model's own parameters: ema= averages them, and "
            "lookahead itself needs a step of your own, under cached_filter_jit"
        )
    if "pytree structure error" in text:
        return ConfigError(
            f"optimizer: its state and the gradients are trees of two kinds ({' '.join(text.split())[:300]}); make "
            "the optimizer of this very model, whose static fields count, too: Optimizer.create(tx, model)"
        )
    return error


def update(recipe: StepRecipe, carry: StepCarry, grads: Any, loss: Any) -> tuple[StepCarry, dict[str, Any]]:
    """Apply the gradients; return the new carry and the update's report."""
    report = {"grad_norm": _norm(grads)} if recipe.grad_norm else {}
    params, opt_state = optimized(recipe.optimizer, carry.params, carry.opt_state, grads, loss)
    taken = carry.taken + 1
    ema = carry.ema
    if ema is not None:
        rest = 1 - jnp.asarray(recipe.ema(carry.taken) if callable(recipe.ema) else recipe.ema, jnp.float32)
        ema = jax.tree.map(lambda a, p: a + rest.astype(a.dtype) * (p.astype(a.dtype) - a), ema, params)
    new = StepCarry(params, opt_state, ema, carry.scale, taken)
    report |= _learning_rate(opt_state)
    if recipe.skip_nonfinite or carry.scale is not None:
        finite = all_finite(grads)
        kept = jax.tree.map(
            lambda now, old: jnp.where(finite, now, old) if eqx.is_array(old) else now,
            new._replace(scale=None),
            carry._replace(scale=None),
        )
        scale = None if carry.scale is None else recipe.precision.next_scale(carry.scale, finite)
        new = kept._replace(scale=scale, taken=taken)
        report |= {"skipped": jnp.logical_not(finite)}
    if carry.scale is not None:
        report["loss_scale"] = carry.scale.scale
    return new, report


def _norm(grads: Any) -> Float[Array, ""]:
    squares = [jnp.sum(jnp.square(jnp.abs(g.astype(wide(g.dtype))))) for g in jax.tree.leaves(grads)]
    return jnp.sqrt(sum(s.astype(jnp.float32) for s in squares))


def _learning_rate(opt_state: Any) -> dict[str, Any]:
    """Return the learning rate of this step, if `optax.inject_hyperparams` stores it in the state."""
    states = jax.tree.leaves(opt_state, is_leaf=lambda x: hasattr(x, "hyperparams"))
    rates = [s.hyperparams["learning_rate"] for s in states if "learning_rate" in getattr(s, "hyperparams", {})]
    return {"learning_rate": rates[0]} if rates else {}
