"""Exponential moving averages of a network's weights."""

import copy
from collections.abc import Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)


class Ema(Generic[M]):
    """Copies of the weights that follow the first at different paces: a <- d a + (1 - d) w.

    Updated every `period` steps with d = decay^period, an average forgets as fast as one updated every step: the
    decay belongs to a step, the period is only a matter of cost (the rule of the CIFAR-10 MeanFlow recipe).

    Attributes:
        models: the averaged networks by their decay, in eval mode, without gradients.

    """

    def __init__(self, model: M, decays: Sequence[float], period: int = 1, *, warmup: bool = True):
        """Start from the present weights.

        Args:
            model: the network to follow.
            decays: share of the average that a step keeps, in [0, 1), one for each average.
            period: optimizer steps between updates.
            warmup: step k keeps at most (1 + k) / (10 + k); otherwise the initial weights would stay for about
                1 / (1 - decay) steps.

        """
        self.models: dict[float, M] = {d: copy.deepcopy(model).eval().requires_grad_(False) for d in decays}
        self.period, self.warmup = period, warmup
        self._weights = [weight.detach() for weight in model.parameters()]
        self._buffers = list(model.buffers())

    @property
    def model(self) -> M:
        """The average of the first decay."""
        return next(iter(self.models.values()))

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Follow the weights, if optimizer step `step` (from 1) ends a period."""
        if step % self.period:
            return
        for decay, model in self.models.items():
            kept = min(decay, step / (9 + step)) if self.warmup else decay
            averages: list[Tensor] = list(model.parameters())
            torch._foreach_lerp_(averages, self._weights, 1 - kept**self.period)
            for average, buffer in zip(model.buffers(), self._buffers, strict=True):
                average.copy_(buffer)
