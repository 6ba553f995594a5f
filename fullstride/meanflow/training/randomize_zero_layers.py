"""A network in which everything that it computes shows: none of its layers is as good as zero."""

import torch
from torch import nn

# A weight that is smaller by this factor than one that keeps the size of what it multiplies stands for zero.
ASLEEP = 0.1
BIAS = 0.3


@torch.no_grad()
def awake(model: nn.Module, generator: torch.Generator) -> nn.Module:
    """The network with random numbers in the weights and biases that are as good as zero."""
    for p in model.parameters():
        keeping = p[0].numel() ** -0.5 if p.ndim > 1 else BIAS
        if (p.square().mean().sqrt() < ASLEEP * keeping) if p.ndim > 1 else not p.any():
            p.normal_(0, keeping, generator=generator)
    return model
