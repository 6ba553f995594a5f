"""Loss functions' results: checks, and metrics stacked into one tensor."""

from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor

Metrics = dict[str, Tensor]


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
