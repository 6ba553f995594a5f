"""Mirrored pictures."""

import torch
from jaxtyping import Shaped
from torch import Tensor


def random_hflip(x: Shaped[Tensor, "b c h w"], generator: torch.Generator | None = None) -> Shaped[Tensor, "b c h w"]:
    """Each image mirrored left to right with probability 1/2.

    Args:
        x: images, (batch, channels, height, width), of any type.
        generator: what decides, on the images' device; the device's own if None.

    Returns:
        A new tensor.

    """
    mirrored = torch.rand(len(x), 1, 1, 1, device=x.device, generator=generator) < 0.5
    return torch.where(mirrored, x.flip(-1), x)
