"""Halving and doubling of feature maps with the binomial filter (1, 3, 3, 1) of NCSN++ (arXiv:2011.13456)."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn


class _Binomial(nn.Module):
    """Holds the 4x4 filter of sum 1, kept on the device: made on each call, it would be copied from the host."""

    def __init__(self):
        super().__init__()
        taps = torch.tensor([1.0, 3.0, 3.0, 1.0]) / 8
        self.register_buffer("kernel", taps.outer(taps), persistent=False)
        self.kernel: Tensor

    def for_each_channel(self, x: Tensor) -> Tensor:
        return self.kernel.to(x.dtype).expand(x.shape[1], 1, -1, -1)


class Halve(_Binomial):
    """Every output pixel a smooth mean of 4x4; a constant stays one, apart from the zeros beyond the border."""

    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h2 w2"]:
        """Half the height and width."""
        return F.conv2d(x, self.for_each_channel(x), stride=2, padding=1, groups=x.shape[1])


class Double(_Binomial):
    """Smooth interpolation to twice the size: the transpose of `Halve`, times 4."""

    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h2 w2"]:
        """Twice the height and width."""
        return F.conv_transpose2d(x, 4 * self.for_each_channel(x), stride=2, padding=1, groups=x.shape[1])
