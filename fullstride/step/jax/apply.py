"""One update by optax, which gets the loss where it takes one."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import optax

from fullstride.errors import ConfigError

# How Python, and optax by hand, say that an update lacks an argument.
NEEDS_MORE = ("required keyword-only argument", "must be provided")


def optimized(optimizer: Any, params: Any, opt_state: Any, grads: Any, loss: Any) -> tuple[Any, Any]:
    """Parameters and optimizer state after one update; the loss, unless None, is its `value` if it takes one.

    Raises:
        ConfigError: for a transformation that needs other arguments, such as a function to evaluate the loss again.

    """
    apply = partial(optax.with_extra_args_support(optimizer).update, grads, opt_state, params)
    # Optax mixes dtypes even in Adam, so that it fails under strict promotion.
    with jax.numpy_dtype_promotion("standard"):
        try:
            updates, opt_state = _given_loss(apply, loss)
        except (AttributeError, TypeError, ValueError) as error:
            raise _explained(error, opt_state, loss) from None
        return optax.apply_updates(params, updates), opt_state


def _given_loss(apply: Callable[..., Any], loss: Any) -> Any:
    if loss is None:
        return apply()
    try:
        return apply(value=loss)
    except TypeError as error:
        # What a chain or a wrapper holds does not show in its signature.
        if "unexpected keyword argument 'value'" not in str(error):
            raise
    return apply()


def _explained(error: Exception, opt_state: Any, loss: Any) -> Exception:
    """Explain an update that failed, where the reason is known; else return the error itself."""
    text = str(error)
    if any(words in text for words in NEEDS_MORE):
        return ConfigError(_lacks(error, loss))
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, optax.LookaheadState))
    if any(isinstance(x, optax.LookaheadState) for x in nodes):
        return ConfigError(
            "optimizer: optax.lookahead trains a pair of fast and slow parameters (optax.LookaheadParams), of which a "
            "model is one; expected an optimizer of the model's own parameters: ema= keeps slow ones beside them, and "
            "lookahead itself needs a step of your own, under cached_filter_jit"
        )
    if "pytree structure error" in text:
        return ConfigError(
            f"optimizer: its state and the gradients are trees of two kinds ({' '.join(text.split())[:300]}); make "
            "the optimizer of this very model, whose static fields count, too: Optimizer.create(tx, model)"
        )
    return error


def _lacks(error: Exception, loss: Any) -> str:
    given = "no loss" if loss is None else "the loss as value"
    return (
        f"optimizer: its update was given gradients, parameters and {given}, and needs more ({error}); expected one "
        "that does with these: optimizer(grads, model, loss) gives the loss, and what evaluates it again, such as a "
        "line search, needs a step of your own, under cached_filter_jit"
    )
