"""Dropout whose draw depends on a seed and on nothing else: not on the device, the compiler, or the pass."""

import torch
from torch import Tensor

# SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), in the signed integers that torch has.
STEP = 0x9E3779B97F4A7C15 - 2**64
MIXES = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))


def seeded_factors(weights: Tensor, dropout: float, seed: int | Tensor) -> Tensor:
    """Return 0 with the probability of dropout, else 1 / (1 - dropout), for each weight of its own draw.

    Weights of the same place in (B, H, Lq, Lk) are drawn alike, in a larger batch, too.
    """
    places = torch.arange(weights.numel(), device=weights.device).view(weights.shape)
    drawn = _mixed(places + _mixed(torch.as_tensor(seed, dtype=torch.int64, device=weights.device)))
    kept = _shifted(drawn, 11) >= int(dropout * 2**53)
    return kept.to(weights.dtype) / (1 - dropout)


def _mixed(x: Tensor) -> Tensor:
    """64 bits of which each depends on all of x."""
    x = (x + 1) * STEP
    for shift, factor in MIXES:
        x = (x ^ _shifted(x, shift)) * factor
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, by: int) -> Tensor:
    """Shift to the right without the sign."""
    return (x >> by) & (2 ** (64 - by) - 1)
