"""Exponential moving average of a network's weights."""

import copy
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)


class Ema(Generic[M]):
    """A second copy of the weights that follows the first: a <- d a + (1 - d) w.

    Early on, `decay` would keep the initial weights for 1 / (1 - decay) updates, so update k uses
    d = min(decay, (1 + k) / (10 + k)).

    Attributes:
        model: the averaged network, in eval mode, without gradients.
        updates: updates made so far.

    """

    def __init__(self, model: M, decay: float, period: int = 1):
        """Start from the present weights.

        Args:
            model: the network to follow.
            decay: share of the average that an update keeps, in [0, 1).
            period: optimizer steps between updates.

        """
        self.model: M = copy.deepcopy(model).eval().requires_grad_(False)
        self.decay, self.period, self.updates = decay, period, 0
        self._pairs = list(zip(self.model.parameters(), model.parameters(), strict=True))
        self._buffers = list(zip(self.model.buffers(), model.buffers(), strict=True))

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Follow the weights, if optimizer step `step` (from 1) ends a period."""
        if step % self.period:
            return
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        averages: list[Tensor] = [average for average, _ in self._pairs]
        torch._foreach_lerp_(averages, [weight.detach() for _, weight in self._pairs], 1 - decay)
        for average, buffer in self._buffers:
            average.copy_(buffer)
        self.updates += 1
