"""Micro-batches of a step, and the weight of each in the step's means."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fullstride.step.torch.metrics import Metrics, reported

Weight = str | Callable[[Any], Tensor | float]


@dataclass(frozen=True)
class Accumulation:
    """Gradient accumulation: gradient = sum_i w_i grad(loss_i) / sum_i w_i over micro-batches i and all processes.

    With w_i = the number of tokens that a mean loss is taken over, it is the gradient of the whole batch's mean, and
    not of the mean of means. A micro-batch of weight 0 adds nothing, though its mean may be NaN.

    Attributes:
        parts: micro-batches that a batch is cut into along its first dimension.
        weight: function of a micro-batch before `draw`, a scalar of any real dtype on the batch's device; or name of a
            metric of the loss, which the step then reports as its sum over micro-batches and processes. A name costs
            writing the gradients once more. None: the number of samples.

    """

    parts: int = 1
    weight: Weight | None = None

    def __post_init__(self) -> None:
        """Check the number of parts.

        Raises:
            ValueError: if it is below 1.

        """
        if self.parts < 1:
            raise ValueError(f"accumulate is {self.parts}, expected a number of micro-batches, at least 1")

    def weight_of(self, part: Any, device: torch.device) -> Tensor:
        """Return the weight of a micro-batch by the function.

        Raises:
            ValueError: if it is not a real scalar.

        """
        assert callable(self.weight)
        weight = self.weight(part)
        if not isinstance(weight, Tensor):
            weight = torch.full((), float(weight), device=device)
        if weight.shape or weight.is_complex():
            raise ValueError(
                f"accumulate: a weight of shape {tuple(weight.shape)} and {weight.dtype}, expected a real scalar for "
                "each micro-batch, such as (labels != -100).sum()"
            )
        return reported(weight)

    def pop(self, metrics: Metrics) -> Tensor:
        """Take the weight of a micro-batch out of its metrics.

        Raises:
            ValueError: if it is not there.

        """
        assert isinstance(self.weight, str)
        if self.weight not in metrics:
            raise ValueError(
                f"accumulate: the loss returned the metrics {sorted(metrics)}, expected {self.weight} among them, the "
                "weight of its micro-batch"
            )
        return reported(metrics.pop(self.weight))
