"""The network of the CIFAR-10 MeanFlow recipe: the U-Net of score-based models (arXiv:2011.13456), 55.9M weights.

DDPM++'s blocks, additive conditioning and sinusoidal times with NCSN++'s resampling filter, in the sizes that EDM
(arXiv:2206.00364) gave it and Gsunshine/py-meanflow trains, without EDM's preconditioning.
"""

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from fullstride.jvp import attention
from fullstride.jvp.mixed_batch import Batch
from fullstride.jvp.modules import Conv2d, Linear
from fullstride.meanflow.models.common import (
    GroupNorm,
    Images,
    Labels,
    as_image,
    as_tokens,
    check_halvings,
    class_vector,
    num_groups,
    through,
)
from fullstride.meanflow.models.resample import Double, Halve

EPS = 1e-6
SKIP_SCALE = math.sqrt(0.5)  # keeps the variance of a sum of two branches
NEAR_ZERO = 1e-5  # of Xavier's law, where a branch ends
QKV_SCALE = math.sqrt(0.2)

L = TypeVar("L", nn.Conv2d, nn.Linear)


Augmented = Float[Tensor, "b a"] | None


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


MAX_PERIOD = 10_000


def _class_embedding(num_classes: int, width: int) -> nn.Embedding:
    """EDM's law, a Xavier layer on one-hot vectors times sqrt(num_classes); 'no class', the last index, is zero."""
    embedding = nn.Embedding(num_classes + 1, width)
    bound = math.sqrt(6 * num_classes / (num_classes + width))
    nn.init.uniform_(embedding.weight, -bound, bound)
    nn.init.zeros_(embedding.weight.data[num_classes])
    return embedding


def sinusoids(time: Float[Batch, " b"], channels: int) -> Float[Batch, "b e"]:
    """sin and cos of a time at frequencies falling geometrically from 1 to 1/10000 (arXiv:1706.03762, section 3.5)."""
    half = channels // 2
    powers = torch.linspace(0, 1, half, dtype=time.dtype, device=time.device)
    angle = time[:, None] * float(MAX_PERIOD) ** -powers
    return torch.cat([angle.sin(), angle.cos()], dim=1)


class Mapping(nn.Module):
    """The vector that conditions every block: times t and t - r, class and augmentation labels; fp32 throughout."""

    def __init__(self, channels: int, augment_dim: int, num_classes: int):
        """Make it for blocks of base width `channels`."""
        super().__init__()
        self.time_channels = 2 * channels
        width = 2 * self.time_channels
        self.augment = xavier(Linear(augment_dim, width, bias=False)) if augment_dim else None
        self.label = _class_embedding(num_classes, width) if num_classes else None
        self.hidden = xavier(Linear(width, 4 * channels))
        self.out = xavier(Linear(4 * channels, 4 * channels))

    def forward(self, r: Tensor, t: Batch, label: Tensor | None, augment: Tensor | None) -> Float[Batch, "b e"]:
        """Embed; no label is 'no class', no augmentation label is a picture as it was."""
        with torch.autocast(t.device.type, enabled=False):
            x = torch.cat([sinusoids(t, self.time_channels), sinusoids(t - r, self.time_channels)], 1)
            x = x + class_vector(self.label, label, r)
            if augment is not None:
                if self.augment is None:
                    raise ValueError("augmentation labels were given to a network made with augment_dim=0")
                x = x + self.augment(augment)
            return F.silu(self.out(F.silu(self.hidden(x))))


class SongUNet(nn.Module):
    """u(z, r, t) with one level per entry of `channel_mult`, each half the size of the one before."""

    def __init__(
        self,
        in_channels: int,
        image_size: int,
        *,
        channels: int = 128,  # base width
        channel_mult: Sequence[int] = (2, 2, 2),  # width of each level in units of `channels`
        num_blocks: int = 4,  # residual blocks a level on the way down; one more on the way up
        attention_resolutions: Sequence[int] = (16,),  # feature map sizes with attention
        dropout: float = 0.2,
        augment_dim: int = 0,  # length of the augmentation labels; 0: none
        num_classes: int = 0,  # 0: unconditional
    ):
        """Make the network for square images of `image_size`.

        Raises:
            ValueError: if `image_size` cannot be halved once per level.

        """
        super().__init__()
        check_halvings(image_size, len(channel_mult))
        halvings = len(channel_mult) - 1
        widths = [channels * m for m in channel_mult]
        attended = [image_size >> level in attention_resolutions for level in range(len(widths))]

        def block(c_in: int, c: int, **options: Any) -> Block:
            return Block(c_in, c, 4 * channels, dropout, **options)

        self.mapping = Mapping(channels, augment_dim, num_classes)
        self.conv_in = conv(in_channels, channels, 3)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        width, skips = channels, [channels]
        for level, wide in enumerate(widths):
            if level:
                self.down.append(block(width, width, resample=Halve()))
                skips.append(width)
            for _ in range(num_blocks):
                self.down.append(block(width, wide, attend=attended[level]))
                skips.append(width := wide)
        self.middle = nn.ModuleList([block(width, width, attend=True), block(width, width)])
        for level in reversed(range(len(widths))):
            if level < halvings:
                self.up.append(block(width, width, resample=Double()))
            for i in range(num_blocks + 1):
                attend = attended[level] and i == num_blocks
                self.up.append(block(width + skips.pop(), width := widths[level], attend=attend))
        self.norm_out, self.conv_out = norm(width, "silu"), conv(width, in_channels, 3, NEAR_ZERO)

    def forward(
        self, z: Images, r: Float[Tensor, " b"], t: Float[Batch, " b"], label: Labels = None, augment: Augmented = None
    ) -> Images:
        """The average velocity over [r, t] of the path through z at time t.

        Raises:
            ValueError: for labels that the network was not made for.

        """
        conditioning = self.mapping(r, t, label, augment)
        h = self.conv_in(z)
        skips = [h]
        for layer in self.down:
            skips.append(h := through(layer, h, conditioning))
        for layer in self.middle:
            h = through(layer, h, conditioning)
        for layer in self.up:
            # A block that doubles takes no skip.
            h = h if isinstance(layer.resample, Double) else torch.cat([h, skips.pop()], 1)
            h = through(layer, h, conditioning)
        return self.conv_out(self.norm_out(h))
