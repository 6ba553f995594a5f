"""Residual blocks and attention of the score-based U-Net (arXiv:2011.13456), started as EDM does (arXiv:2206.00364)."""

import math
from typing import TypeVar

from jaxtyping import Float
from torch import nn

from fullstride.jvp import attention
from fullstride.jvp.mixed_batch import Batch
from fullstride.jvp.modules import Conv2d, Linear
from fullstride.meanflow.models.attention import as_image, as_tokens
from fullstride.meanflow.models.norm import GroupNorm, num_groups

EPS = 1e-6
SKIP_SCALE = math.sqrt(0.5)  # keeps the variance of a sum of two branches
NEAR_ZERO = 1e-5  # of Xavier's law, where a branch ends
QKV_SCALE = math.sqrt(0.2)

L = TypeVar("L", nn.Conv2d, nn.Linear)


def xavier(layer: L, scale: float = 1.0) -> L:
    """Xavier's uniform law times `scale`, zero bias."""
    nn.init.xavier_uniform_(layer.weight)
    layer.weight.data.mul_(scale)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


def conv(channels_in: int, channels: int, kernel: int, scale: float = 1.0) -> nn.Conv2d:
    """A convolution that keeps the size."""
    return xavier(Conv2d(channels_in, channels, kernel, padding=kernel // 2), scale)


def norm(channels: int, act: str | None = None) -> GroupNorm:
    """Up to 32 groups of at least four channels."""
    return GroupNorm(channels, num_groups(channels), EPS, act=act)


class Attention(nn.Module):
    """One head over all pixels, added to its input."""

    def __init__(self, channels: int):
        """Make it; the projection starts near zero."""
        super().__init__()
        self.norm = norm(channels)
        self.qkv = conv(channels, 3 * channels, 1, QKV_SCALE)
        self.out = conv(channels, channels, 1, NEAR_ZERO)

    def forward(self, x: Float[Batch, "b c h w"]) -> Float[Batch, "b c h w"]:
        """Attend, add, rescale."""
        q, k, v = as_tokens(self.qkv(self.norm(x)))[:, None].chunk(3, dim=-1)
        return (x + self.out(as_image(attention(q, k, v)[:, 0], x))) * SKIP_SCALE


class Block(nn.Module):
    """norm, SiLU, convolution, shift by the conditioning, norm, SiLU, dropout, convolution; plus the input; attention.

    `resample` acts before the first convolution and before the projection of the skip.
    """

    recompute = False

    def __init__(
        self,
        channels_in: int,
        channels: int,
        conditioning: int,
        dropout: float,
        *,
        attend: bool = False,
        resample: nn.Module | None = None,
    ):
        """Make the block; its last convolution starts near zero."""
        super().__init__()
        self.channels_in, self.resample = channels_in, resample
        self.norm1, self.conv1 = norm(channels_in, "silu"), conv(channels_in, channels, 3)
        self.shift = xavier(Linear(conditioning, channels))
        self.norm2, self.conv2 = norm(channels, "silu"), conv(channels, channels, 3, NEAR_ZERO)
        self.dropout = nn.Dropout(dropout)
        same = channels == channels_in and resample is None
        self.skip = nn.Identity() if same else conv(channels_in, channels, 1)
        self.attention = Attention(channels) if attend else nn.Identity()

    def forward(self, x: Float[Batch, "b c h w"], conditioning: Float[Batch, "b e"]) -> Float[Batch, "b d h2 w2"]:
        """One residual step."""
        h = self.norm1(x)
        if self.resample is not None:
            h, x = self.resample(h), self.resample(x)
        h = self.conv1(h) + self.shift(conditioning)[:, :, None, None]
        h = self.conv2(self.dropout(self.norm2(h)))
        return self.attention((self.skip(x) + h) * SKIP_SCALE)
