"""The U-Net of the average velocity u(z, r, t): residual blocks with GroupNorm and SiLU, attention at chosen sizes.

The family of DDPM (arXiv:2006.11239) and its score-based successors (arXiv:2011.13456), conditioned on two times.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from fullstride.jvp.mixed_batch import Batch
from fullstride.jvp.modules import Conv2d, Linear
from fullstride.meanflow.models.common import (
    GroupNorm,
    Images,
    Labels,
    SelfAttention2d,
    check_halvings,
    class_vector,
    through,
    zero_init,
)
from fullstride.meanflow.models.resample import Repeat


class TimeEmbedding(nn.Module):
    """sin and cos of a time at geometrically spaced frequencies from 1 to `max_frequency` radians.

    The highest frequency bounds how fast u can turn with t, hence the variance of du/dt in the target.
    """

    def __init__(self, channels: int, max_frequency: float):
        """Make the embedding of `channels` values, half of them sines."""
        super().__init__()
        frequencies = torch.logspace(0, math.log10(max_frequency), channels // 2)
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.frequencies: Tensor

    def forward(self, time: Float[Batch, " b"]) -> Float[Batch, "b e"]:
        """Embed each time."""
        angle = time[:, None] * self.frequencies.to(time.dtype)
        return torch.cat([angle.sin(), angle.cos()], dim=1)


class Conditioning(nn.Module):
    """The vector that conditions every block: both time channels t and t - r, and the class if there is one."""

    def __init__(self, channels: int, out: int, max_frequency: float, num_classes: int):
        """Make it; `num_classes` 0 is unconditional, else one more embedding stands for 'no class'."""
        super().__init__()
        self.time = TimeEmbedding(channels, max_frequency)
        self.hidden = Linear(2 * self.time.frequencies.numel() * 2, out)
        self.out = Linear(out, out)
        self.label = nn.Embedding(num_classes + 1, out) if num_classes else None

    def forward(self, r: Float[Tensor, " b"], t: Float[Batch, " b"], label: Labels) -> Float[Batch, "b e"]:
        """Embed (t, t - r) and the label, where None means 'no class'; never in half precision.

        Raises:
            ValueError: for a label when there are no classes.

        """
        # du/dt is the derivative of this vector carried on: rounded to bf16 it would be a staircase in t.
        with torch.autocast(t.device.type, enabled=False):
            hidden = F.silu(self.hidden(torch.cat([self.time(t), self.time(t - r)], dim=1)))
            return F.silu(self.out(hidden + class_vector(self.label, label, r)))


class ResidualBlock(nn.Module):
    """norm, SiLU, convolution, shift by the conditioning; norm, SiLU, dropout, convolution; plus the input."""

    def __init__(self, channels_in: int, channels: int, conditioning: int, dropout: float):
        """Make the block; its last convolution starts at zero, so the block starts as its skip."""
        super().__init__()
        self.norm1 = GroupNorm(channels_in, act="silu")
        self.conv1 = Conv2d(channels_in, channels, 3, padding=1)
        self.shift = Linear(conditioning, channels)
        self.norm2 = GroupNorm(channels, act="silu")
        self.dropout = nn.Dropout(dropout)
        self.conv2 = zero_init(Conv2d(channels, channels, 3, padding=1))
        self.skip = Conv2d(channels_in, channels, 1) if channels_in != channels else nn.Identity()

    def forward(self, x: Float[Batch, "b c h w"], conditioning: Float[Batch, "b e"]) -> Float[Batch, "b d h w"]:
        """One residual step."""
        h = self.conv1(self.norm1(x)) + self.shift(conditioning)[:, :, None, None]
        return self.skip(x) + self.conv2(self.dropout(self.norm2(h)))


class Stage(nn.Module):
    """A residual block, then attention if the feature map has one of the chosen sizes."""

    recompute = False

    def __init__(self, channels_in: int, channels: int, conditioning: int, dropout: float, attend: bool):
        """Make the stage."""
        super().__init__()
        self.block = ResidualBlock(channels_in, channels, conditioning, dropout)
        self.attention = SelfAttention2d(channels) if attend else nn.Identity()

    def forward(self, x: Float[Batch, "b c h w"], conditioning: Float[Batch, "b e"]) -> Float[Batch, "b d h w"]:
        """Block, then attention."""
        return self.attention(self.block(x, conditioning))


class UNet(nn.Module):
    """u(z, r, t) with one level per entry of `channel_mult`, each half the size of the one before."""

    def __init__(
        self,
        in_channels: int,
        image_size: int,
        *,
        channels: int = 128,  # width of the first level
        channel_mult: Sequence[int] = (1, 2, 3),  # width of each level in units of `channels`
        num_blocks: int = 3,  # residual blocks a level on the way down; one more on the way up
        attention_resolutions: Sequence[int] = (16,),  # feature map sizes with attention
        dropout: float = 0.0,
        time_max_frequency: float = 64.0,  # radians; see TimeEmbedding
        num_classes: int = 0,  # 0: unconditional
    ):
        """Make the network for square images of `image_size`.

        Raises:
            ValueError: if `image_size` cannot be halved once per level.

        """
        super().__init__()
        check_halvings(image_size, len(channel_mult))
        halvings = len(channel_mult) - 1
        conditioning = 4 * channels
        widths = [channels * m for m in channel_mult]
        sizes = [image_size >> level for level in range(len(widths))]

        def stage(c_in: int, level: int) -> Stage:
            attend = sizes[level] in attention_resolutions
            return Stage(c_in, widths[level], conditioning, dropout, attend)

        self.conditioning = Conditioning(channels, conditioning, time_max_frequency, num_classes)
        self.conv_in = Conv2d(in_channels, channels, 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        width, skips = channels, [channels]
        for level in range(len(widths)):
            for _ in range(num_blocks):
                self.down.append(stage(width, level))
                width = widths[level]
                skips.append(width)
            if level < halvings:
                self.down.append(Conv2d(width, width, 3, stride=2, padding=1))
                skips.append(width)
        self.middle = nn.ModuleList(
            [
                Stage(width, width, conditioning, dropout, attend=True),
                Stage(width, width, conditioning, dropout, attend=False),
            ]
        )
        for level in reversed(range(len(widths))):
            for _ in range(num_blocks + 1):
                self.up.append(stage(width + skips.pop(), level))
                width = widths[level]
            if level:
                self.up.append(nn.Sequential(Repeat(), Conv2d(width, width, 3, padding=1)))
        self.norm_out = GroupNorm(width, act="silu")
        self.conv_out = zero_init(Conv2d(width, in_channels, 3, padding=1))

    def forward(self, z: Images, r: Float[Tensor, " b"], t: Float[Batch, " b"], label: Labels = None) -> Images:
        """The average velocity over [r, t] of the path through z at time t."""
        conditioning = self.conditioning(r, t, label)
        h = self.conv_in(z)
        skips = [h]
        for layer in self.down:
            h = through(layer, h, conditioning) if isinstance(layer, Stage) else layer(h)
            skips.append(h)
        for layer in self.middle:
            h = through(layer, h, conditioning)
        for layer in self.up:
            stage = isinstance(layer, Stage)
            h = through(layer, torch.cat([h, skips.pop()], 1), conditioning) if stage else layer(h)
        return self.conv_out(self.norm_out(h))
