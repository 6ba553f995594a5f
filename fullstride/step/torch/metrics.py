"""Loss functions' results: checks, means over micro-batches, and metrics stacked into one tensor."""

from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor

Metrics = dict[str, Tensor]
Mean = Callable[[Metrics], Metrics]
_WEIGHT_OF = "weight of "


def check_loss(loss: Any) -> None:
    """Check a loss without waiting for the device.

    Raises:
        ValueError: if it is not a tensor of shape () and a real floating dtype.

    """
    if not isinstance(loss, Tensor):
        what = f"a tuple of {len(loss)}" if isinstance(loss, tuple) else f"a {type(loss).__name__}"
        raise ValueError(f"loss_fn returned {what}; expected a scalar tensor, or the pair of it and metrics by name")
    if loss.shape or not loss.is_floating_point():
        expected = "a scalar: take its mean" if loss.shape else "a floating dtype"
        raise ValueError(f"loss_fn returned a loss of {_kind(loss)}; expected {expected}")


def checked_metrics(metrics: Any, loss: Tensor) -> Metrics:
    """Return metrics by name, numbers as tensors on the loss's device.

    Raises:
        ValueError: if they have no names, one is not a real scalar, or a name is one of the step's own.

    """
    if not isinstance(metrics, Mapping):
        raise ValueError(
            f"loss_fn returned a loss and a {type(metrics).__name__}; expected the loss alone, or the pair of it and "
            'metrics by name, such as {"accuracy": tensor}'
        )
    if taken := {"loss", "grad_norm"} & metrics.keys():
        raise ValueError(f"the loss has metrics named {sorted(taken)}, expected other names: a step adds these")
    found = {
        name: torch.full((), float(value), device=loss.device) if isinstance(value, Real) else value
        for name, value in metrics.items()
    }
    for name, value in found.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"the loss has a metric {name} that is a {type(value).__name__}, expected a scalar tensor")
        if value.shape or value.is_complex():
            raise ValueError(
                f"the loss has a metric {name} of {_kind(value)}, expected a real scalar, such as its mean"
            )
    return found


def reported(value: Tensor) -> Tensor:
    """Return a metric in fp32, or in fp64 if it has that."""
    return value.detach() if value.dtype == torch.float64 else value.detach().float()


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


def _kind(tensor: Tensor) -> str:
    """Return dtype and shape, such as float32[4,2]."""
    return f"{str(tensor.dtype).removeprefix('torch.')}[{','.join(map(str, tensor.shape))}]"


def stacked(metrics: Metrics) -> Tensor:
    """Stack metrics by name into one tensor, in fp64 if one of them is."""
    wide = torch.float64 if any(value.dtype == torch.float64 for value in metrics.values()) else torch.float32
    return torch.stack([metrics[name].detach().to(wide) for name in sorted(metrics)])


def unstacked(values: Tensor, like: dict[str, torch.dtype]) -> Metrics:
    """Undo `stacked`, given the dtype of each metric."""
    found = dict(zip(sorted(like), values.unbind(), strict=True))
    return {name: found[name].to(dtype) for name, dtype in like.items()}
