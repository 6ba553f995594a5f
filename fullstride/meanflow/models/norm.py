"""Group normalisation, the one place through which every norm of the networks goes."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn


def group_norm(
    x: Float[Tensor, "b c h w"],
    groups: int,
    weight: Float[Tensor, " c"],
    bias: Float[Tensor, " c"],
    eps: float = 1e-5,
) -> Float[Tensor, "b c h w"]:
    """Group normalisation (arXiv:1803.08494), the affine part written out.

    `F.group_norm` with its own weight and bias cannot be compiled under `torch.func.jvp` (an internal assert on torch
    2.11 to 2.14); without them it can.
    """
    return F.group_norm(x, groups, eps=eps) * weight[:, None, None] + bias[:, None, None]


class GroupNorm(nn.Module):
    """`nn.GroupNorm` with the same parameters and state_dict keys, through `group_norm`."""

    def __init__(self, channels: int, groups: int = 32, eps: float = 1e-5):
        """Make the norm; `groups` is lowered to the largest divisor of `channels` that it admits."""
        super().__init__()
        self.groups = next(g for g in range(min(groups, channels), 0, -1) if channels % g == 0)
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
        """Normalise over each group's channels and pixels."""
        return group_norm(x, self.groups, self.weight, self.bias, self.eps)
