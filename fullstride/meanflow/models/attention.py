"""The attention block of the U-Net."""

from jaxtyping import Float
from torch import Tensor, nn

from fullstride.jvp import attention
from fullstride.meanflow.models.norm import GroupNorm
from fullstride.meanflow.models.zero import zero_init


class SelfAttention2d(nn.Module):
    """Multi-head self-attention over the pixels of a feature map, with its norm and residual."""

    def __init__(self, channels: int, head_channels: int = 64):
        """Make the block; the last projection starts at zero, so the block starts as the identity."""
        super().__init__()
        self.heads = max(1, channels // head_channels)
        if channels % self.heads:
            raise ValueError(f"channels is {channels}, expected a multiple of the {self.heads} heads")
        self.norm = GroupNorm(channels)
        self.qkv = nn.Conv2d(channels, 3 * channels, 1)
        self.out = zero_init(nn.Conv2d(channels, channels, 1))

    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
        """x + attention over the h * w pixels."""
        b, c, h, w = x.shape
        qkv = self.qkv(self.norm(x)).reshape(b, 3, self.heads, c // self.heads, h * w)
        q, k, v = qkv.transpose(-2, -1).unbind(1)
        return x + self.out(attention(q, k, v).transpose(-2, -1).reshape(b, c, h, w))
