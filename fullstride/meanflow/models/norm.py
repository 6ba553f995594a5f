"""Normalisation, the one place through which every norm of the networks goes."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn


def full_precision(x: Tensor) -> Tensor:
    """x in fp32, or in fp64 if it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def group_norm(
    x: Float[Tensor, "b c h w"],
    groups: int,
    weight: Float[Tensor, " c"],
    bias: Float[Tensor, " c"],
    eps: float = 1e-5,
) -> Float[Tensor, "b c h w"]:
    """Group normalisation (arXiv:1803.08494), the affine part written out.

    `F.group_norm` with its own weight and bias cannot be compiled under `torch.func.jvp` (an internal assert on torch
    2.11 to 2.14); without them it can. Half precision is normalised in fp32.
    """
    return F.group_norm(full_precision(x), groups, eps=eps) * weight[:, None, None] + bias[:, None, None]


def layer_norm(x: Float[Tensor, "b n d"], eps: float = 1e-6) -> Float[Tensor, "b n d"]:
    """Layer normalisation (arXiv:1607.06450) without weight and bias, in fp32 or better."""
    return F.layer_norm(full_precision(x), x.shape[-1:], eps=eps)


def rms_norm(x: Float[Tensor, "*s d"], weight: Float[Tensor, " d"], eps: float = 1e-6) -> Float[Tensor, "*s d"]:
    """x / sqrt(mean x^2) * weight (arXiv:1910.07467), computed in fp32 or better, returned in x's own format."""
    x_full = full_precision(x)
    return (x_full * torch.rsqrt(x_full.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


# With one channel a group, a shift of the channel before the norm, which is how the times enter, would be erased.
MIN_CHANNELS_A_GROUP = 4


def num_groups(channels: int, most: int = 32) -> int:
    """The largest number of equal groups up to `most` that leaves each at least 4 channels."""
    limit = max(1, min(most, channels // MIN_CHANNELS_A_GROUP))
    return next(g for g in range(limit, 0, -1) if channels % g == 0)


class GroupNorm(nn.Module):
    """`nn.GroupNorm` with the same parameters and state_dict keys, through `group_norm`."""

    def __init__(self, channels: int, groups: int | None = None, eps: float = 1e-5):
        """Make the norm; `groups` is `num_groups(channels)` unless given."""
        super().__init__()
        self.groups = groups or num_groups(channels)
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
        """Normalise over each group's channels and pixels."""
        return group_norm(x, self.groups, self.weight, self.bias, self.eps)
