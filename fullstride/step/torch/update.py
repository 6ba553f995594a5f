"""Update of the weights by an optimizer that a guard or a loss scale may have skip it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fullstride.step.torch.clipping import Clip
from fullstride.step.torch.optimizers import members

Verdict = Tensor | tuple[Tensor, Tensor]
Guard = Callable[[Tensor, Tensor], Verdict]


def guarded(optimizer: torch.optim.Optimizer, verdict: Verdict, clip: Clip | None, norm: Tensor) -> None:
    """Tell fused optimizers what to do on the device, as a gradient scaler does, for this step alone.

    Args:
        optimizer: that steps.
        verdict: whether to skip the step, or that and what its gradient is to be divided by.
        clip: that has shortened the gradient already.
        norm: of the gradient before.

    """
    harmful, shrink = verdict if isinstance(verdict, tuple) else (verdict, None)
    listening: list[Any] = members(optimizer)
    for each in listening:
        each.found_inf = harmful.float()
    if shrink is not None:
        if clip is not None and clip.norm is not None:
            shrink = (shrink * (clip.norm / norm).clamp(max=1)).clamp(min=1)
        for each in listening:
            each.grad_scale = shrink.float()
    try:
        optimizer.step()
    finally:
        for each in listening:
            for name in ("found_inf", "grad_scale"):
                vars(each).pop(name, None)


def unscale(optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
    """Divide the gradients by the scale of the loss, and note whether one is not finite."""
    for each in members(optimizer):
        scaler.unscale_(each)


def scaled(optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
    """Step, unless a gradient is not finite, and then adapt the scale of the next loss."""
    for each in members(optimizer):
        scaler.step(each)
    scaler.update()
