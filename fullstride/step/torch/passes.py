"""Optimizers that have the loss evaluated more than once in a step: by a closure, or twice."""

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fullstride.step.torch.metrics import Metrics

if TYPE_CHECKING:
    from fullstride.step.torch.body import Body, Look, Parts

ONE, TWO, CLOSURE = "one pass", "two passes", "a closure"


def passes_of(optimizer: torch.optim.Optimizer) -> str:
    """Return how an optimizer has the loss evaluated in a step.

    `step(closure)` that needs one is a closure's, as LBFGS's; `first_step` and `second_step` are those of two passes,
    the names that implementations of SAM have (arXiv:2010.01412).
    """
    if callable(getattr(optimizer, "first_step", None)) and callable(getattr(optimizer, "second_step", None)):
        return TWO
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return ONE if closure is None or closure.default is not closure.empty else CLOSURE


def _by_closure(body: "Body", parts: "Parts", look: "Look | None") -> Metrics:
    """Let the optimizer evaluate the loss and its clipped gradient as often as it likes.

    Raises:
        ValueError: if it does so not once.

    """
    evaluated: list[Metrics] = []

    @torch.enable_grad()
    def closure() -> Tensor:
        evaluated.append(body.finished(body.gradients_of(parts), None if evaluated else look))
        return evaluated[-1]["loss"]

    optimizer: Any = body.optimizer
    optimizer.step(closure)
    if not evaluated:
        raise ValueError(f"{type(optimizer).__name__}.step(closure) did not call its closure, expected at least once")
    return evaluated[0]


def _by_two(body: "Body", parts: "Parts", look: "Look | None") -> Metrics:
    """Take the gradient at the weights that the first one leads to; that one is clipped, and its norm reported."""
    metrics = body.gradients_of(parts)
    if look is not None:
        look(metrics["loss"], [p.grad for p in body.trained.values()])
    optimizer: Any = body.optimizer
    optimizer.first_step()
    norm = body.finished(body.gradients_of(parts), None)["grad_norm"]
    optimizer.second_step()
    return metrics | {"grad_norm": norm}


PASSES: dict[str, Callable[["Body", "Parts", "Look | None"], Metrics]] = {CLOSURE: _by_closure, TWO: _by_two}
