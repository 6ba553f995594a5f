"""One training step as a pure function of trees: loss, gradients, optimizer, averages of the weights."""

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
from fullstride.step.jax.apply import optimized
from fullstride.step.jax.loss import LossFn, accumulated, describe, gradients, parts_of_loss
from fullstride.step.jax.mean import is_mean, values
from fullstride.step.jax.precision import Precision, ScaleState, all_finite, wide
from fullstride.step.jax.sharding import Sharding

Transformation = optax.GradientTransformation | optax.MultiSteps
Ema = float | Callable[[Int[Array, ""]], Float[Array, ""]] | None


class Carry(NamedTuple):
    """What a step reads and writes.

    Attributes:
        params: the model with its trainable arrays, None elsewhere.
        opt_state: the optimizer's state.
        ema: exponential moving average of `params`, in fp32 where they are shorter; None without one.
        scale: state of dynamic loss scaling; None without it.
        taken: steps taken.

    """

    params: Any
    opt_state: Any
    ema: Any
    scale: ScaleState | None
    taken: Int[Array, ""]


@dataclass(frozen=True)
class Recipe:
    """What a step does, all of it known when it is built; see `TrainStep` for the meanings."""

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
        """Check what can be checked without a model.

        Raises:
            ConfigError: naming the argument.

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

    def start(self, params: Any) -> Carry:
        """The carry before the first step."""
        # In bf16 the average would lose its increments, which are far below its last digit.
        ema = None if self.ema is None else jax.tree.map(lambda p: p.astype(wide(p.dtype)), params)
        with jax.numpy_dtype_promotion("standard"):
            opt_state = self.optimizer.init(params)
        return Carry(params, opt_state, ema, self.precision.initial_scale(), jnp.zeros((), jnp.int32))

    def decay(self, taken: Int[Array, ""]) -> Float[Array, ""]:
        """The average's decay in this step."""
        decay = self.ema(taken) if callable(self.ema) else self.ema
        return jnp.asarray(decay, jnp.float32)


def require_count(name: str, value: Any) -> None:
    """Check that a setting is an integer of 1 or more.

    Raises:
        ConfigError: if not.

    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name}={value}: expected an integer of 1 or more")


def differentiate(
    recipe: Recipe, params: Any, rest: Any, batch: Any, key: Any, scale: ScaleState | None = None
) -> tuple[Any, Any, Any]:
    """Gradients, loss and aux of a batch; `rest` is the model without its trainable arrays."""
    factor, cast = recipe.precision.factor(scale), recipe.precision.cast

    def objective(params: Any, batch: Any, key: Any) -> tuple[Any, Any, Any]:
        model = cast(eqx.combine(params, rest))
        if recipe.sharding is not None:
            # After the cast, so that less is sent.
            model = recipe.sharding.gathered(model)
        given = cast(batch) if recipe.precision.cast_batch else batch
        loss, aux = parts_of_loss(recipe.loss_fn(model, given, key), recipe.has_aux)
        value = values(loss)
        value = value.astype(wide(value.dtype))
        return value * jnp.asarray(factor, value.dtype), loss if is_mean(loss) else value, aux

    if recipe.accumulate == 1:
        grads, loss, aux = gradients(objective, params, batch, key)
    else:
        grads, loss, aux = accumulated(objective, recipe.accumulate, params, batch, key)
    if not (isinstance(factor, float) and factor == 1):
        # In fp16 a scale of 2^16 is infinite.
        grads = jax.tree.map(lambda g: (g.astype(w := wide(g.dtype)) / jnp.asarray(factor, w)).astype(g.dtype), grads)
    return grads, *values((loss, aux))


def update(recipe: Recipe, carry: Carry, grads: Any, loss: Any) -> tuple[Carry, dict[str, Any]]:
    """The carry after the gradients are applied, and what the update says of itself."""
    report = {"grad_norm": _norm(grads)} if recipe.grad_norm else {}
    params, opt_state = optimized(recipe.optimizer, carry.params, carry.opt_state, grads, loss)
    taken = carry.taken + 1
    ema = None if carry.ema is None else _averaged(carry.ema, params, recipe.decay(carry.taken))
    new = Carry(params, opt_state, ema, carry.scale, taken)
    report |= _learning_rate(opt_state)
    if recipe.skip_nonfinite or carry.scale is not None:
        finite = all_finite(grads)
        kept = jax.tree.map(partial(_where, finite), new._replace(scale=None), carry._replace(scale=None))
        scale = None if carry.scale is None else recipe.precision.next_scale(carry.scale, finite)
        new = kept._replace(scale=scale, taken=taken)
        report |= {"skipped": jnp.logical_not(finite)}
    if carry.scale is not None:
        report["loss_scale"] = carry.scale.scale
    return new, report


def _norm(grads: Any) -> Float[Array, ""]:
    squares = [jnp.sum(jnp.square(jnp.abs(g.astype(wide(g.dtype))))) for g in jax.tree.leaves(grads)]
    return jnp.sqrt(sum(s.astype(jnp.float32) for s in squares))


def _averaged(ema: Any, params: Any, decay: Float[Array, ""]) -> Any:
    def toward(a: Any, p: Any) -> Any:
        return a + (1 - decay).astype(a.dtype) * (p.astype(a.dtype) - a)

    return jax.tree.map(toward, ema, params)


def _where(chosen: Any, new: Any, old: Any) -> Any:
    return jnp.where(chosen, new, old) if eqx.is_array(old) else new


def _learning_rate(opt_state: Any) -> dict[str, Any]:
    """The learning rate of this step, where `optax.inject_hyperparams` keeps it in the state."""
    states = jax.tree.leaves(opt_state, is_leaf=lambda x: hasattr(x, "hyperparams"))
    rates = [s.hyperparams["learning_rate"] for s in states if "learning_rate" in getattr(s, "hyperparams", {})]
    return {"learning_rate": rates[0]} if rates else {}
