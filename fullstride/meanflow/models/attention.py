"""The attention block of the U-Net."""

from jaxtyping import Float
from torch import nn

from fullstride.jvp import attention
from fullstride.jvp.mixed_batch import Batch
from fullstride.jvp.modules import Conv2d
from fullstride.meanflow.models.common import zero_init
from fullstride.meanflow.models.norm import GroupNorm


def as_tokens(x: Float[Batch, "b c h w"]) -> Float[Batch, "b n c"]:
    """One token a pixel; a view, and of an image in channels_last a contiguous one."""
    return x.flatten(2).transpose(1, 2)


def as_image(tokens: Float[Batch, "b n c"], like: Float[Batch, "b d h w"]) -> Float[Batch, "b c h w"]:
    """The pixels of tokens, as many as another image has; of contiguous tokens a view in channels_last."""
    return tokens.transpose(1, 2).unflatten(2, like.shape[2:])


class SelfAttention2d(nn.Module):
    """Multi-head self-attention over the pixels of a feature map, with its norm and residual."""

    def __init__(self, channels: int, head_channels: int = 64):
        """Make the block; the last projection starts at zero, so the block starts as the identity."""
        super().__init__()
        self.heads = max(1, channels // head_channels)
        if channels % self.heads:
            raise ValueError(f"channels is {channels}, expected a multiple of the {self.heads} heads")
        self.norm = GroupNorm(channels)
        self.qkv = Conv2d(channels, 3 * channels, 1)
        self.out = zero_init(Conv2d(channels, channels, 1))

    def forward(self, x: Float[Batch, "b c h w"]) -> Float[Batch, "b c h w"]:
        """x + attention over the h * w pixels."""
        qkv = as_tokens(self.qkv(self.norm(x))).unflatten(2, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        return x + self.out(as_image(attention(q, k, v).transpose(1, 2).flatten(2), x))
