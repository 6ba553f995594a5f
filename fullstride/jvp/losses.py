"""Losses by arguments that PyTorch's derivatives take for constants: weights and targets, whose tangents they lose."""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from fullstride.jvp.dual import moves

Loss = Callable[..., Tensor]


def cross_entropy(
    input: Tensor,  # noqa: A002
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Compute `F.cross_entropy`, also along a tangent of the classes' weights."""
    if weight is None or not moves(weight) or target.is_floating_point():  # shares of classes are multiplied
        return F.cross_entropy(
            input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing
        )  # fmt: skip
    dim = 1 if input.dim() > 1 else 0
    logs, shown = input.log_softmax(dim), target != ignore_index
    weights = _of_classes(weight, target, shown)
    loss = -_at(logs, target, shown, dim) * weights
    if label_smoothing:
        shape = [-1 if i == dim else 1 for i in range(input.dim())]
        even = -(logs * weight.view(shape)).sum(dim) * shown
        loss = (1 - label_smoothing) * loss + label_smoothing / input.shape[dim] * even
    return _reduced(loss, _reduction(size_average, reduce, reduction), weights)


def nll_loss(
    input: Tensor,  # noqa: A002
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Compute `F.nll_loss`, also along a tangent of the classes' weights."""
    if weight is None or not moves(weight):
        return F.nll_loss(input, target, weight, size_average, ignore_index, reduce, reduction)
    shown = target != ignore_index
    weights = _of_classes(weight, target, shown)
    loss = -_at(input, target, shown, 1 if input.dim() > 1 else 0) * weights
    return _reduced(loss, _reduction(size_average, reduce, reduction), weights)


def binary_cross_entropy(
    input: Tensor,  # noqa: A002
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Compute `F.binary_cross_entropy`, also along a tangent of the weight, and with a gradient of a moving target."""
    if not moves(target) and (weight is None or not moves(weight)):
        return F.binary_cross_entropy(input, target, weight, size_average, reduce, reduction)
    if moves(target):  # PyTorch's own logarithms are at least -100, too
        loss = -target * input.log().clamp(min=-100) - (1 - target) * (-input).log1p().clamp(min=-100)
    else:
        loss = F.binary_cross_entropy(input, target, reduction="none")
    loss = loss if weight is None else loss * weight
    return _reduced(loss, _reduction(size_average, reduce, reduction))


def binary_cross_entropy_with_logits(
    input: Tensor,  # noqa: A002
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    pos_weight: Tensor | None = None,
) -> Tensor:
    """Compute `F.binary_cross_entropy_with_logits`, also along tangents of the weights."""
    if not any(x is not None and moves(x) for x in (weight, pos_weight)):
        return F.binary_cross_entropy_with_logits(
            input, target, weight, size_average, reduce, reduction, pos_weight
        )  # fmt: skip
    positive = target if pos_weight is None else target * pos_weight
    loss = -positive * F.logsigmoid(input) - (1 - target) * F.logsigmoid(-input)
    loss = loss if weight is None else loss * weight
    return _reduced(loss, _reduction(size_average, reduce, reduction))


def soft_margin_loss(
    input: Tensor,  # noqa: A002
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Compute `F.soft_margin_loss`, also along a tangent of the target."""
    if not moves(target):
        return F.soft_margin_loss(input, target, size_average, reduce, reduction)
    return _reduced(-F.logsigmoid(target * input), _reduction(size_average, reduce, reduction))


def linear_cross_entropy(*args: Any, options: Any = None, **kwargs: Any) -> Tensor:
    """Compute `F.linear_cross_entropy` whole: in chunks, for which `options` ask, PyTorch (2.13) loses tangents."""
    if (weight := kwargs.get("weight")) is not None and moves(weight):
        raise ValueError("a tangent of linear_cross_entropy's weight, expected none; call linear and cross_entropy")
    return F.linear_cross_entropy(*args, **kwargs)


def _at(logs: Tensor, target: Tensor, shown: Tensor, dim: int) -> Tensor:
    return logs.gather(dim, target.where(shown, 0).unsqueeze(dim)).squeeze(dim)


def _of_classes(weight: Tensor, target: Tensor, shown: Tensor) -> Tensor:
    return weight[target.where(shown, 0)] * shown


def _reduction(size_average: bool | None, reduce: bool | None, reduction: str) -> str:
    """Return the reduction that two older arguments stand for, if they are given."""
    if size_average is None and reduce is None:
        return reduction
    return "none" if reduce is False else "sum" if size_average is False else "mean"


def _reduced(loss: Tensor, reduction: str, weights: Tensor | None = None) -> Tensor:
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    return loss.mean() if weights is None else loss.sum() / weights.sum()


_NAMES = ("cross_entropy", "nll_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits", "soft_margin_loss")
ROUTES: dict[Any, Loss] = {getattr(F, name): globals()[name] for name in _NAMES}
if hasattr(F, "linear_cross_entropy"):
    ROUTES[F.linear_cross_entropy] = linear_cross_entropy
