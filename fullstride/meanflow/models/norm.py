"""Normalisation, the one place through which every norm of the networks goes."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fullstride import jvp
from fullstride.jvp.mixed_batch import Batch


def full_precision(x: Batch) -> Batch:
    """x in fp32, or in fp64 if it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _consumed(x: Batch) -> torch.dtype | None:
    """The format in which autocast's products will read a norm's output: written so, it need not be cast there."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def ada_layer_norm(
    x: Float[Batch, "b n d"], scale: Float[Batch, "b 1 d"], shift: Float[Batch, "b 1 d"]
) -> Float[Batch, "b n d"]:
    """(1 + scale) layer_norm(x) + shift (arXiv:2212.09748), computed in fp32 or better."""
    return jvp.ada_layer_norm(x, scale, shift, eps=1e-6, dtype=_consumed(x))


def rms_norm(x: Float[Batch, "*s d"], weight: Float[Tensor, " d"], eps: float = 1e-6) -> Float[Batch, "*s d"]:
    """x / sqrt(mean x^2) * weight (arXiv:1910.07467), computed in fp32 or better, returned in x's own format."""
    return jvp.rms_norm(x, weight, eps, dtype=x.dtype)


# With one channel a group, a shift of the channel before the norm, which is how the times enter, would be erased.
MIN_CHANNELS_A_GROUP = 4


def num_groups(channels: int, most: int = 32) -> int:
    """The largest number of equal groups up to `most` that leaves each at least 4 channels."""
    limit = max(1, min(most, channels // MIN_CHANNELS_A_GROUP))
    return next(g for g in range(limit, 0, -1) if channels % g == 0)


class GroupNorm(nn.Module):
    """`nn.GroupNorm` with the same parameters and state_dict keys, in fp32 or better, with SiLU behind it on demand."""

    def __init__(self, channels: int, groups: int | None = None, eps: float = 1e-5, *, act: str | None = None):
        """Make the norm; `groups` is `num_groups(channels)` unless given, `act` None or "silu"."""
        super().__init__()
        self.groups = groups or num_groups(channels)
        self.eps, self.act = eps, act
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Float[Batch, "b c h w"]) -> Float[Batch, "b c h w"]:
        """Normalise over each group's channels and pixels."""
        settings = {
            "dtype": _consumed(x),
            "implementation": "fused",
        }  # without a tangent, too, faster than the library's
        return jvp.group_norm(x, self.groups, self.weight, self.bias, self.eps, self.act, **settings)
