"""Between [-1, 1] and the bytes of a picture."""

import torch
from jaxtyping import Float, UInt8
from torch import Tensor


def to_uint8(images: Float[Tensor, "*n c h w"]) -> UInt8[Tensor, "*n c h w"]:
    """Bytes of images in [-1, 1], on the CPU: clamped, then the nearest of 256 levels.

    Raises:
        ValueError: if a pixel is not finite.

    """
    if not images.isfinite().all():
        raise ValueError("images hold pixels that are not finite; the sampler or the network diverged")
    levels = (images.detach().cpu().double().clamp(-1, 1) + 1) * 127.5
    return levels.round().to(torch.uint8)
