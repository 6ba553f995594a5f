"""Loss of a batch and its gradients, in micro-batches if requested; the loss must be a floating scalar.

A `Mean` carries its weight, so that it stays exact if a batch is divided.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from fullstride.errors import ConfigError
from fullstride.step.jax.precision import is_floating, wide

LossFn = Callable[..., Any]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mean:
    """`total / weight`: a loss or a metric whose parts weigh differently, such as one over a number of tokens.

    Over micro-batches totals and weights are added up before the one is divided by the other, so that loss, gradients
    and metrics are those of the whole batch; a loss that divides by itself makes a rare token of a short part count
    more than one of a long part.

    Attributes:
        total: a sum; of a loss a floating scalar, of a metric any array.
        weight: what it is a sum over, a real number or an array that goes with `total`. It is taken for a constant: no
            gradient flows through it.

    """

    total: Any
    weight: Any

    @property
    def value(self) -> Float[Array, "..."]:
        """Mean in fp32 or better; 0 if both total and weight are 0."""
        total = _floating(self.total)
        return total / self.divisor.astype(total.dtype)

    @property
    def divisor(self) -> Float[Array, "..."]:
        """Return the weight, or 1 if total and weight are 0: a part may contain nothing that counts."""
        weight = jax.lax.stop_gradient(_floating(self.weight))
        nothing = (weight == 0) & (_floating(self.total) == 0)
        return jnp.where(nothing, jnp.ones_like(weight), weight)


def _floating(x: Any) -> Array:
    x = jnp.asarray(x)
    return x.astype(wide(x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else jnp.result_type(float))


def is_mean(x: Any) -> bool:
    """Return whether `x` is a `Mean`."""
    return isinstance(x, Mean)


def values(tree: Any) -> Any:
    """Return the tree with each `Mean` replaced by its value."""
    return jax.tree.map(lambda x: x.value if is_mean(x) else x, tree, is_leaf=is_mean)


def parts_of_loss(out: Any, has_aux: bool | None) -> tuple[Any, Any]:
    """Return the loss, a real floating scalar, and aux from a loss function's result; `has_aux=None` infers it.

    Raises:
        ConfigError: if the loss is not a real floating scalar, or is not where `has_aux` says.

    """
    paired = isinstance(out, tuple) and len(out) == 2
    if has_aux is True and not paired:
        raise ConfigError(f"loss_fn returned {describe(out)}, but has_aux=True: expected the pair (loss, aux)")
    loss, aux = out if paired and has_aux is not False else (out, None)
    if isinstance(loss, Mean):
        return Mean(_checked(loss.total, "a Mean with a total"), _checked_weight(loss.weight)), aux
    return _checked(loss, "a loss"), aux


def parts_of_stateful_loss(out: Any, has_aux: bool | None) -> tuple[Any, Any, Any]:
    """Return the loss, aux and the new state from the result of a loss function that was given a state.

    Raises:
        ConfigError: unless it is (loss, nn_state) or (loss, nn_state, aux).

    """
    sizes = (2, 3) if has_aux is None else (3,) if has_aux else (2,)
    if not (isinstance(out, tuple) and len(out) in sizes):
        got = f"a tuple of {len(out)}" if isinstance(out, tuple) else describe(out)
        raise ConfigError(
            f"loss_fn returned {got}; a loss that is given nn_state returns (loss, nn_state) or (loss, nn_state, aux)"
        )
    loss, nn_state, *aux = out
    return *parts_of_loss((loss, *aux) if aux else loss, bool(aux)), nn_state


def _checked(loss: Any, what: str) -> jax.Array:
    if not isinstance(loss, jax.Array):
        raise ConfigError(
            f"loss_fn returned {describe(loss)}; expected a scalar array or a Mean, or a pair of it and aux"
        )
    if loss.shape:
        raise ConfigError(f"loss_fn returned {what} of {describe(loss)}; expected a scalar: take its mean or sum")
    if not is_floating(loss):
        raise ConfigError(f"loss_fn returned {what} of {describe(loss)}; expected a floating dtype")
    return loss


def _checked_weight(weight: Any) -> Any:
    known = isinstance(weight, jax.Array | np.ndarray | np.generic | int | float)
    real = known and jnp.issubdtype(getattr(weight, "dtype", type(weight)), jnp.number)
    if not real or jnp.iscomplexobj(weight) or jnp.shape(weight):
        raise ConfigError(
            f"loss_fn returned a Mean with a weight of {describe(weight)}; expected one real number, such as how many "
            "tokens its total is of"
        )
    return jnp.asarray(weight)


def describe(x: Any) -> str:
    """Describe a value: `float32[4,3]` for an array, `a dict` for the rest."""
    if hasattr(x, "dtype") and hasattr(x, "shape"):
        return f"{x.dtype.name}[{','.join(map(str, x.shape))}]"
    return f"a {type(x).__name__}"


def gradients(objective: Callable[..., Any], params: Any, *args: Any) -> tuple[Any, Any, Any, Any]:
    """Compute gradients with respect to `params`, the loss in fp32 or better, aux, and the new state's arrays.

    `objective(params, *args)` returns what is differentiated, the loss to report, aux, and the arrays.
    """

    def paired(params: Any) -> tuple[Any, Any]:
        value, *others = objective(params, *args)
        return value, others

    grads, others = jax.grad(paired, has_aux=True)(params)
    return grads, *others


def accumulated(
    objective: Callable[..., Any], count: int, params: Any, batch: Any, key: Any, state: tuple[Any, ...] = ()
) -> tuple[Any, Any, Any, Any]:
    """Accumulate `gradients` over `count` micro-batches: the mean of gradients, losses and floating aux.

    `objective(params, batch, key, state)` is as in `gradients`; each micro-batch gets the state that the one before it
    left, and the last one's is returned.

    Micro-batch i holds the samples i, i + count, ..., so that a batch that is split over devices stays where it is.
    A loss that is a `Mean` weighs each of them by its weight, and so does each `Mean` of aux for itself: the results
    are those of the whole batch. Integers of aux are counts: they are added.
    """
    batches = jax.tree_util.tree_map_with_path(lambda path, x: _interleaved(path, x, count), batch)
    keys = split_key(key, count)

    def one(state: Any, batch: Any, key: Any) -> tuple[Any, Any]:
        grads, loss, aux, state = gradients(objective, params, batch, key, state)
        if is_mean(loss):
            # As those of its total, in fp32 or better.
            grads = jax.tree.map(lambda g: g.astype(w := wide(g.dtype)) * loss.divisor.astype(w), grads)
        return (grads, loss, aux), state

    kinds, _ = jax.eval_shape(one, state, *jax.tree.map(lambda x: x[0], (batches, keys)))

    def add(carry: Any, inputs: Any) -> tuple[Any, None]:
        total, state = carry
        found, state = one(state, *inputs)
        return (jax.tree.map(lambda a, b: a + jnp.asarray(b).astype(a.dtype), total, found), state), None

    # Sums of bf16 are kept in fp32.
    zeros = jax.tree.map(lambda kind: jnp.zeros(kind.shape, wide(kind.dtype)), kinds)
    ((grads, loss, aux), state), _ = jax.lax.scan(add, (zeros, state), (batches, keys))
    by = loss.divisor if is_mean(loss) else jnp.asarray(count, jnp.float32)
    grads = jax.tree.map(lambda g, p: (g / by.astype(g.dtype)).astype(p.dtype), grads, params)
    loss, aux = jax.tree.map(lambda x, kind: _mean(x, kind, count), (loss, aux), kinds[1:], is_leaf=is_mean)
    return grads, loss, aux, state


def split_key(key: Any, count: int) -> Any:
    """Split a key into `count` keys along a new first axis; a tree of keys is split leaf by leaf.

    Raises:
        ConfigError: if `key` is not a random key.

    """
    try:
        return jax.tree.map(lambda x: jax.random.split(x, count), key)
    except (TypeError, ValueError):
        raise ConfigError(f"key is {describe(key)}; expected one of jax.random.key(seed)") from None


def _mean(total: Any, kind: Any, count: int) -> Any:
    if is_mean(total):
        return total
    inexact = jnp.issubdtype(total.dtype, jnp.inexact)
    return (total / jnp.asarray(count, total.dtype)).astype(kind.dtype) if inexact else total


def _interleaved(path: Any, x: Any, count: int) -> Any:
    if x.ndim == 0 or x.shape[0] % count:
        name = "batch" + jax.tree_util.keystr(path)
        raise ConfigError(f"{name} is {describe(x)}; accumulate={count} needs a first axis that it divides")
    return x.reshape(x.shape[0] // count, count, *x.shape[1:]).swapaxes(0, 1)
