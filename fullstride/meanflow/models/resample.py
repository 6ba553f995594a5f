"""Halving and doubling of feature maps with the binomial filter (1, 3, 3, 1) of NCSN++ (arXiv:2011.13456)."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

BINOMIAL = (1.0, 3.0, 3.0, 1.0)


def _filters(x: Tensor, gain: float) -> Tensor:
    """One 4x4 filter of sum `gain` for each channel."""
    taps = torch.tensor(BINOMIAL, dtype=x.dtype, device=x.device)
    kernel = taps.outer(taps) * (gain / taps.sum() ** 2)
    return kernel.expand(x.shape[1], 1, -1, -1)


def halve(x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h2 w2"]:
    """Every output pixel a smooth mean of 4x4; a constant stays one, apart from the zeros beyond the border."""
    return F.conv2d(x, _filters(x, 1.0), stride=2, padding=1, groups=x.shape[1])


def double(x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h2 w2"]:
    """Smooth interpolation to twice the size: the transpose of `halve`, times 4."""
    return F.conv_transpose2d(x, _filters(x, 4.0), stride=2, padding=1, groups=x.shape[1])
