"""Losses by arguments that PyTorch's derivatives take for constants: weights and targets, whose tangents they lose.

PyTorch's own loss is called unless one of them moves; the formulas are those of its documentation.
"""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from fullstride.jvp.dual import moves

Loss = Callable[..., Tensor]


def cross_entropy(
    input: Tensor,  # noqa: A002
    target: Tensor,
    weight: Tensor,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Compute `F.cross_entropy` with a weight that moves."""
    if target.is_floating_point():  # shares of classes, which PyTorch multiplies by the weight
        return F.cross_entropy(input, target, weight, size_average, -100, reduce, reduction, label_smoothing)
    dim = 1 if input.dim() > 1 else 0
    logs = input.log_softmax(dim)
    loss = nll_loss(logs, target, weight, ignore_index=ignore_index, reduction="none")
    shown = target != ignore_index
    if label_smoothing:
        even = -(logs.movedim(dim, -1) * weight).sum(-1) * shown
        loss = (1 - label_smoothing) * loss + label_smoothing / input.shape[dim] * even
    return _reduced(loss, size_average, reduce, reduction, weight[target.where(shown, 0)] * shown)


def nll_loss(
    input: Tensor,  # noqa: A002
    target: Tensor,
    weight: Tensor,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Compute `F.nll_loss` with a weight that moves."""
    dim, shown = 1 if input.dim() > 1 else 0, target != ignore_index
    classes = target.where(shown, 0)
    weights = weight[classes] * shown
    loss = -input.gather(dim, classes.unsqueeze(dim)).squeeze(dim) * weights
    return _reduced(loss, size_average, reduce, reduction, weights)


def binary_cross_entropy(
    input: Tensor,  # noqa: A002
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Compute `F.binary_cross_entropy` with a weight or a target that moves; logarithms are at least -100."""
    loss = -target * input.log().clamp(min=-100) - (1 - target) * (-input).log1p().clamp(min=-100)
    return _reduced(loss if weight is None else loss * weight, size_average, reduce, reduction)


def binary_cross_entropy_with_logits(
    input: Tensor,  # noqa: A002
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    pos_weight: Tensor | None = None,
) -> Tensor:
    """Compute `F.binary_cross_entropy_with_logits` with weights that move."""
    positive = target if pos_weight is None else target * pos_weight
    loss = -positive * F.logsigmoid(input) - (1 - target) * F.logsigmoid(-input)
    return _reduced(loss if weight is None else loss * weight, size_average, reduce, reduction)


def soft_margin_loss(
    input: Tensor,  # noqa: A002
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Compute `F.soft_margin_loss` with a target that moves."""
    return _reduced(-F.logsigmoid(target * input), size_average, reduce, reduction)


def linear_cross_entropy(*args: Any, options: Any = None, **kwargs: Any) -> Tensor:
    """Compute `F.linear_cross_entropy` whole: in chunks, for which `options` ask, PyTorch (2.13) loses tangents."""
    if (weight := kwargs.get("weight")) is not None and moves(weight):
        raise ValueError("a tangent of linear_cross_entropy's weight, expected none; call linear and cross_entropy")
    return F.linear_cross_entropy(*args, **kwargs)


def _reduced(
    loss: Tensor, size_average: bool | None, reduce: bool | None, reduction: str, weights: Tensor | None = None
) -> Tensor:
    """Reduce as `reduction` says, or the two older arguments if one is given; a mean is by the weights, if any."""
    if size_average is not None or reduce is not None:
        reduction = "none" if reduce is False else "sum" if size_average is False else "mean"
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    return loss.mean() if weights is None else loss.sum() / weights.sum()


def _unless_still(theirs: Loss, ours: Loss, **constants: int) -> Loss:
    """PyTorch's loss, or ours if one of the arguments at these places that it takes for constants moves."""

    def loss(*args: Any, **kwargs: Any) -> Tensor:
        given = [args[at] if at < len(args) else kwargs.get(name) for name, at in constants.items()]
        return (ours if any(x is not None and moves(x) for x in given) else theirs)(*args, **kwargs)

    return loss


ROUTES: dict[Any, Loss] = {
    F.cross_entropy: _unless_still(F.cross_entropy, cross_entropy, weight=2),
    F.nll_loss: _unless_still(F.nll_loss, nll_loss, weight=2),
    F.binary_cross_entropy: _unless_still(F.binary_cross_entropy, binary_cross_entropy, target=1, weight=2),
    F.binary_cross_entropy_with_logits: _unless_still(
        F.binary_cross_entropy_with_logits, binary_cross_entropy_with_logits, weight=2, pos_weight=6
    ),
    F.soft_margin_loss: _unless_still(F.soft_margin_loss, soft_margin_loss, target=1),
}
if hasattr(F, "linear_cross_entropy"):
    ROUTES[F.linear_cross_entropy] = linear_cross_entropy
