"""Layers that start as zero."""

from torch import nn


def zero_init(layer: nn.Conv2d) -> nn.Conv2d:
    """The layer with weight and bias 0, so that a residual branch starts as nothing."""
    nn.init.zeros_(layer.weight)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer
