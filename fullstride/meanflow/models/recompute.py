"""Blocks whose activations are computed anew in the backward pass: less memory, a forward pass more.

A block that can be has the attribute `recompute = False`, and its network calls it by `through`.
"""

from torch import nn

from fullstride.jvp import checkpoint
from fullstride.jvp.mixed_batch import Batch


def through(block: nn.Module, *args: Batch) -> Batch:
    """block(*args); where `recompute` marked the block, only its arguments are kept."""
    return checkpoint(block, *args) if getattr(block, "recompute", False) else block(*args)


def recompute(model: nn.Module) -> int:
    """Mark the blocks that can be computed anew, and return how many there are."""
    blocks = [m for m in model.modules() if hasattr(m, "recompute")]
    for block in blocks:
        block.recompute = True  # pyright: ignore[reportArgumentType]
    return len(blocks)
