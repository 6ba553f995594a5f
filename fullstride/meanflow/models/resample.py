"""Halving and doubling of feature maps, with NCSN++'s binomial filter (1, 3, 3, 1) (arXiv:2011.13456) or without.

Written as sums of neighbours, which the compiler turns into one pass over the map: as depthwise convolutions they took
cuDNN a fifth of a step (H200, bf16, channels_last).
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from fullstride.jvp.mixed_batch import Batch
from fullstride.jvp.products import linear_map
from fullstride.meanflow.models.common import full_precision


class Halve(nn.Module):
    """Every output pixel a smooth mean of 4x4; a constant stays one, apart from the zeros beyond the border."""

    def forward(self, x: Float[Batch, "b c h w"]) -> Float[Batch, "b c h2 w2"]:
        """Half the height and width."""
        return linear_map(lambda x: _in_order(_halved, x), x)


class Double(nn.Module):
    """Smooth interpolation to twice the size: the transpose of `Halve`, times 4."""

    def forward(self, x: Float[Batch, "b c h w"]) -> Float[Batch, "b c h2 w2"]:
        """Twice the height and width."""
        return linear_map(lambda x: _in_order(_doubled, x), x)


class Repeat(nn.Module):
    """Every pixel four times; the gradient is a sum of four, where that of `nn.Upsample` is a scatter, if compiled."""

    def forward(self, x: Float[Batch, "b c h w"]) -> Float[Batch, "b c h2 w2"]:
        """Twice the height and width."""
        return linear_map(lambda x: _in_order(_repeated, x), x)


def _in_order(resample: Callable[[Tensor, int], Tensor], x: Tensor) -> Tensor:
    """Apply a function of two neighbouring dimensions (it takes the index of the first) in x's memory order."""
    if x.is_contiguous() or not x.is_contiguous(memory_format=torch.channels_last):
        return resample(x, 2)
    return resample(x.permute(0, 2, 3, 1), 1).permute(0, 3, 1, 2)


def _halved(x: Tensor, rows: int) -> Tensor:
    y = full_precision(x)
    for dim in (rows, rows + 1):
        even, odd = y.unflatten(dim, (-1, 2)).unbind(dim + 1)
        y = (3 * (even + odd) + _before(odd, dim) + _behind(even, dim)) / 8
    return y.to(x.dtype)


def _doubled(x: Tensor, rows: int) -> Tensor:
    y = full_precision(x)
    for dim in (rows, rows + 1):
        pair = 3 * y + _before(y, dim), 3 * y + _behind(y, dim)
        y = torch.stack(pair, dim + 1).flatten(dim, dim + 1) / 4
    return y.to(x.dtype)


def _repeated(x: Tensor, rows: int) -> Tensor:
    each = x.unsqueeze(rows + 1).unsqueeze(rows + 3)
    sizes = [2 if dim in (rows + 1, rows + 3) else size for dim, size in enumerate(each.shape)]
    return each.expand(sizes).flatten(rows + 2, rows + 3).flatten(rows, rows + 1)


def _before(x: Tensor, dim: int) -> Tensor:
    """The neighbour before each element; zero before the first."""
    return F.pad(x.narrow(dim, 0, x.shape[dim] - 1), [0, 0] * (x.ndim - 1 - dim) + [1, 0])


def _behind(x: Tensor, dim: int) -> Tensor:
    """The neighbour behind each element; zero behind the last."""
    return F.pad(x.narrow(dim, 1, x.shape[dim] - 1), [0, 0] * (x.ndim - 1 - dim) + [0, 1])
