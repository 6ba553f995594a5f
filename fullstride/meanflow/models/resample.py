"""Halving and doubling of feature maps, with NCSN++'s binomial filter (1, 3, 3, 1) (arXiv:2011.13456) or without."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from fullstride.jvp.modules import linear_map
from fullstride.jvp.partial import Batch


class _Binomial(nn.Module):
    """Holds the 4x4 filter of sum 1, kept on the device: made on each call, it would be copied from the host."""

    def __init__(self):
        super().__init__()
        taps = torch.tensor([1.0, 3.0, 3.0, 1.0]) / 8
        self.register_buffer("kernel", taps.outer(taps), persistent=False)
        self.kernel: Tensor

    def for_each_channel(self, x: Batch) -> Tensor:
        return self.kernel.to(x.dtype).expand(x.shape[1], 1, -1, -1)


class Halve(_Binomial):
    """Every output pixel a smooth mean of 4x4; a constant stays one, apart from the zeros beyond the border."""

    def forward(self, x: Float[Batch, "b c h w"]) -> Float[Batch, "b c h2 w2"]:
        """Half the height and width."""
        kernel = self.for_each_channel(x)
        return linear_map(lambda x: F.conv2d(x, kernel, stride=2, padding=1, groups=len(kernel)), x)


class Double(_Binomial):
    """Smooth interpolation to twice the size: the transpose of `Halve`, times 4."""

    def forward(self, x: Float[Batch, "b c h w"]) -> Float[Batch, "b c h2 w2"]:
        """Twice the height and width."""
        kernel = 4 * self.for_each_channel(x)
        return linear_map(lambda x: F.conv_transpose2d(x, kernel, stride=2, padding=1, groups=len(kernel)), x)


class Repeat(nn.Module):
    """Every pixel four times; the gradient is a sum of four, where that of `nn.Upsample` is a scatter, if compiled."""

    def forward(self, x: Float[Batch, "b c h w"]) -> Float[Batch, "b c h2 w2"]:
        """Twice the height and width, in x's memory order."""
        return linear_map(_doubled, x)


def _doubled(x: Tensor) -> Tensor:
    if x.is_contiguous() or not x.is_contiguous(memory_format=torch.channels_last):
        return _repeated(x, 2)
    return _repeated(x.permute(0, 2, 3, 1), 1).permute(0, 3, 1, 2)


def _repeated(x: Tensor, rows: int) -> Tensor:
    """Each element of the dimension `rows`, and of the next, twice in a row."""
    each = x.unsqueeze(rows + 1).unsqueeze(rows + 3)
    sizes = [2 if dim in (rows + 1, rows + 3) else size for dim, size in enumerate(each.shape)]
    return each.expand(sizes).flatten(rows + 2, rows + 3).flatten(rows, rows + 1)
