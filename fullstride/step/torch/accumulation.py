"""Micro-batches of a step, and the weight of each in the step's means."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fullstride.step.torch.metrics import Metrics, reported

Weight = str | Callable[[Any], Tensor | float]
Mean = Callable[[Metrics], Metrics]
_WEIGHT_OF = "weight of "


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


def times(value: Tensor, weight: Tensor | float) -> Tensor:
    """Return a value times its weight; 0 for a weight of 0, even if the value is NaN, as the mean of nothing is."""
    if not isinstance(weight, Tensor):
        return value * weight
    return (value * weight).masked_fill(weight == 0, 0)


def or_one(total: Tensor) -> Tensor:
    """Return a sum of weights, or 1 if it is 0, to divide by: a gradient of nothing is 0."""
    return total.masked_fill(total == 0, 1)


class WeightedSums:
    """Sums of metrics over micro-batches, each times its weight, and the weights of those that had the metric."""

    def __init__(self) -> None:
        self._sums = dict[str, Any]()
        self._weights = dict[str, Any]()

    def add(self, values: Metrics, weight: Tensor | float) -> None:
        """Add the metrics of a micro-batch."""
        for key, value in values.items():
            self._sums[key] = self._sums.get(key, 0) + times(reported(value), weight)
            self._weights[key] = self._weights.get(key, 0) + weight

    def means(self) -> Metrics:
        """Return the means, given weights that are shares of 1; each over the micro-batches that had the metric."""
        whole = self._weights["loss"]
        return {k: x / w if (w := self._weights[k]) < whole else x for k, x in self._sums.items()}

    def weighted_means(self, mean: Mean) -> tuple[Metrics, Tensor]:
        """Return the means, given any weights, and the weight of the loss, which is `mean` over the processes."""
        weights = {_WEIGHT_OF + key: weight for key, weight in self._weights.items()}
        found = mean(self._sums | weights)
        return {key: found[key] / found[_WEIGHT_OF + key] for key in self._sums}, found[_WEIGHT_OF + "loss"]
