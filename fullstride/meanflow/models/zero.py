"""Layers that start as zero."""

from typing import TypeVar

from torch import nn

L = TypeVar("L", nn.Conv2d, nn.Linear)


def zero_init(layer: L) -> L:
    """The layer with weight and bias 0, so that a residual branch starts as nothing."""
    nn.init.zeros_(layer.weight)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer
