"""Attention, the one place through which every attention of the networks goes."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd import forward_ad

from fullstride.meanflow.models.norm import GroupNorm
from fullstride.meanflow.models.zero import zero_init


def attention(
    q: Float[Tensor, "b n l d"], k: Float[Tensor, "b n l d"], v: Float[Tensor, "b n l d"]
) -> Float[Tensor, "b n l d"]:
    """softmax(q k^T / sqrt(d)) v (arXiv:1706.03762, equation 1).

    The library's fused attention where no tangent flows; the same mathematics in plain operations where one does, as
    no fused attention of PyTorch has a forward derivative.
    """
    # The level is named: left out, the compiler would read the global one at the first attention that it meets and take
    # it for all, also for those inside the JVP where that first one was outside.
    if forward_ad.unpack_dual(q, level=0).tangent is None:
        return F.scaled_dot_product_attention(q, k, v)
    weights = torch.softmax(q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5, dim=-1)
    return weights @ v


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
