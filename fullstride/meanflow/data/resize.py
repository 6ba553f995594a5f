"""Bringing pictures in memory to another size."""

import torch
import torch.nn.functional as F
from jaxtyping import UInt8
from torch import Tensor

from fullstride.errors import ConfigError, one_of

FITS = ("pad", "resize", "crop")
# Pictures at a time: each needs four bytes a value and copies while it is resized.
BLOCK = 1024


def fit(images: UInt8[Tensor, "n c h w"], size: int, how: str, *, value: int = 0) -> UInt8[Tensor, "n c size size"]:
    """Square pictures of `size` pixels a side.

    Args:
        images: any height and width.
        size: of the result.
        how: `pad` surrounds the picture, one more row or column below or right where the rest is odd; `resize`
            stretches height and width to `size`; `crop` does so with the square in the middle of the picture. Both
            with the bicubic filter, widened where the picture shrinks, as PIL's.
        value: of the pixels around the picture, 0 to 255.

    Raises:
        ConfigError: for a size below 1, one that does not hold the picture (`pad`), or an unknown `how`.

    """
    one_of("data.fit", how, FITS)
    if size < 1:
        raise ConfigError(f"data.image_size={size}: expected a number of pixels")
    height, width = images.shape[-2:]
    if how == "pad":
        check_padded(height, width, size)
        top, left = (size - height) // 2, (size - width) // 2
        return F.pad(images, (left, size - width - left, top, size - height - top), value=value)
    if how == "crop":
        side = min(height, width)
        top, left = (height - side) // 2, (width - side) // 2
        images = images[..., top : top + side, left : left + side]
    if images.shape[-2:] == (size, size):
        return images.contiguous()
    blocks = (block.float() for block in images.split(BLOCK))
    resized = (F.interpolate(block, (size, size), mode="bicubic", antialias=True) for block in blocks)
    return torch.cat([block.round().clamp(0, 255).to(torch.uint8) for block in resized])


def check_padded(height: int, width: int, size: int) -> None:
    """Raise unless pictures can be padded to a size.

    Raises:
        ConfigError: for a smaller one.

    """
    if size < max(height, width):
        raise ConfigError(
            f"data.image_size={size}: the pictures are {height}x{width}, which data.fit=pad cannot shrink; "
            "set data.fit=crop or resize"
        )
