"""AdamW as BERT is trained: warm-up, linear decay, no weight decay of biases and norms."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from fullstride.bert.training.settings import OptimizerSettings


def learning_rate(settings: OptimizerSettings, steps: int, step: Any, xp: Any = jnp) -> Any:
    """The learning rate of a step, counted from 0, of so many (arXiv:1810.04805, appendix A.2).

    It rises linearly, reaching `lr` at the last step of the warm-up, then falls linearly to 0 after the last step.

    Args:
        settings: settings of the optimizer.
        steps: number of steps of the whole run.
        step: index of the step, a number or an array.
        xp: array module: numpy on the host, jax.numpy inside a step.

    """
    warmup = settings.warmup_steps
    factor = xp.minimum(1.0, (step + 1) / max(1, warmup))
    if settings.decay == "linear":
        factor = xp.minimum(factor, (steps - step) / max(1, steps - warmup))
    return settings.lr * factor


def decayed(params: Any) -> Any:
    """Mask of the arrays with weight decay: matrices, and neither biases nor the norms' vectors."""
    return jax.tree.map(lambda x: x.ndim >= 2, params)


def optimizer_of(settings: OptimizerSettings, steps: int) -> optax.GradientTransformation:
    """The optimizer of a run of so many steps."""
    adamw = optax.adamw(
        lambda step: learning_rate(settings, steps, step),
        b1=settings.beta1,
        b2=settings.beta2,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        mask=decayed,
    )
    clip = [optax.clip_by_global_norm(settings.grad_clip)] if settings.grad_clip else []
    return optax.chain(*clip, adamw)


def updates(opt_state: Any) -> int:
    """Number of updates that such an optimizer has made; waits for the device."""
    (_, count), *_ = optax.tree.get_all_with_path(opt_state, "count")
    return int(count)
