"""Clipping of gradients by their norm or by value, and sparse ones."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fullstride.step.torch.errors import StepError


@dataclass(frozen=True)
class Clip:
    """Clipping of the gradients of all optimizers of a step together; by norm first if it is by both.

    Attributes:
        norm: longest norm; longer gradients are scaled to it, as by `torch.nn.utils.clip_grad_norm_`.
        value: largest magnitude of an element, as by `torch.nn.utils.clip_grad_value_`.

    """

    norm: float | None = None
    value: float | None = None

    def __post_init__(self) -> None:
        """Check the limits.

        Raises:
            ValueError: if there is none, or one is not above 0.

        """
        given = [x for x in (self.norm, self.value) if x is not None]
        if not given or min(given) <= 0:
            raise ValueError(f"clip: norm is {self.norm} and value {self.value}, expected one above 0")

    @property
    def writes(self) -> int:
        """Number of times that clipping writes a gradient in place."""
        return (self.norm is not None) + 2 * (self.value is not None)  # from above and from below

    def __call__(self, parameters: Sequence[Any], norm: Tensor) -> None:
        """Clip the gradients of parameters, or of whatever else has a `grad`, given their norm."""
        if self.norm is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.norm, norm)
        if self.value is not None:
            dense = [p for p in parameters if p.grad is not None and not p.grad.is_sparse]
            torch.nn.utils.clip_grad_value_(dense, self.value)
            for p in parameters:
                if p.grad is not None and p.grad.is_sparse:
                    p.grad = p.grad.coalesce()
                    p.grad._values().clamp_(-self.value, self.value)


def of_values(gradient: Tensor) -> Tensor:
    """Return the numbers of a sparse gradient, each once, or a dense one."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def refuse_sparse(parameters: Mapping[str, nn.Parameter]) -> None:
    """Check that no gradient is sparse.

    Raises:
        StepError: with the name of a parameter that has one.

    """
    for name, p in parameters.items():
        if p.grad is not None and p.grad.is_sparse:
            raise StepError(
                f"{name} has a sparse gradient, expected dense ones: build it with sparse=False, or use backend=eager "
                "in one process"
            )
