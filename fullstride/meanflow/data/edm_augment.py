"""Augmentation with labels, as EDM trains CIFAR-10 (arXiv:2206.00364, appendix F.2): the network is told what was done.

Mirroring, isotropic and anisotropic scaling and fractional translation; the MeanFlow recipe leaves out EDM's vertical
mirroring and rotation. The geometry is one resampling at twice the resolution, between two passes of the sym6 wavelet's
low-pass filter, so that no frequencies fold over.
"""

import functools
import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

# The low-pass decomposition filter of the sym6 wavelet (Daubechies, Ten Lectures on Wavelets, table 6.3): sum sqrt 2.
SYM6 = (
    0.015404109327027373, 0.0034907120842174702, -0.11799011114819057, -0.048311742585633, 0.4910559419267466,
    0.787641141030194, 0.3379294217276218, -0.07263752278646252, -0.021060292512300564, 0.04472490177066578,
    0.0017677118642428036, -0.007800708325034148,
)  # fmt: skip
SCALE_STD = 0.2  # of the logarithm to base 2, for both scalings
TRANSLATE_STD = 0.125  # in units of the picture's size
ROTATED_AXES = 0.5  # probability that anisotropic scaling has axes of its own


@dataclass(frozen=True)
class AugmentDraw:
    """Augmentation parameters of each picture; zeros leave it unchanged.

    Attributes:
        flip: 1 mirrors left to right.
        scale: log2 of the enlargement, in units of 0.2.
        stretch: log2 of the enlargement along one axis and of the shrinking along the other, in units of 0.2.
        angle: direction of that axis, in radians, anticlockwise from the horizontal.
        shift: translation to the right and downwards, in units of an eighth of the size.

    """

    flip: Float[Tensor, " b"]
    scale: Float[Tensor, " b"]
    stretch: Float[Tensor, " b"]
    angle: Float[Tensor, " b"]
    shift: Float[Tensor, "2 b"]

    def labels(self) -> Float[Tensor, "b 6"]:
        """Augmentation labels that the network receives."""
        parts = [self.flip, self.scale, self.stretch * self.angle.cos(), self.stretch * self.angle.sin(), *self.shift]
        return torch.stack(parts, dim=1)

    def linear(self) -> Float[Tensor, "2 2 b"]:
        """The matrix A of the map from a place p of the result, from its centre, to the place A (p - shift) it shows.

        1 / e^l along the stretched axis and e^l across it make cosh(l) - sinh(l) R, where R mirrors at that axis.
        """
        log_stretch = math.log(2) * SCALE_STD * self.stretch
        cosh, sinh = log_stretch.cosh(), log_stretch.sinh()
        c, s = sinh * (2 * self.angle).cos(), sinh * (2 * self.angle).sin()
        shrunk = (-SCALE_STD * self.scale).exp2()
        return torch.stack([cosh - c, s, s, cosh + c]).unflatten(0, (2, 2)) * shrunk


@functools.cache
def _filter(device: torch.device, dtype: torch.dtype) -> Tensor:
    # Kept for each device, as making it there waits for a copy from the host.
    return torch.tensor(SYM6, device=device, dtype=dtype)


def _along_width(x: Tensor, taps: Tensor, stride: int = 1, padding: int = 0) -> Tensor:
    """Correlate the rows of every channel with the taps."""
    channels = x.shape[1]
    kernel = taps.expand(channels, 1, 1, -1)
    return F.conv2d(x, kernel, stride=(1, stride), padding=(0, padding), groups=channels)


def _double(x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h2 w2"]:
    """Zeros between the pixels, then the low-pass filter, of which every second tap meets a pixel."""
    even, odd = _filter(x.device, x.dtype).flip(0).view(-1, 2).unbind(1)
    reach = len(even) // 2
    for _ in range(2):
        even_places = _along_width(x, even, padding=reach)[..., :-1]
        odd_places = _along_width(x, odd, padding=reach)[..., 1:]
        x = torch.stack([even_places, odd_places], dim=-1).flatten(-2).mT
    return x


def _halve(x: Float[Tensor, "b c h2 w2"]) -> Float[Tensor, "b c h w"]:
    """Every second place of the low-passed picture, as far as the filter lies within it."""
    for _ in range(2):
        x = _along_width(x, _filter(x.device, x.dtype), stride=2).mT
    return x


def _fine_places(size: int, like: Tensor) -> Tensor:
    """The places at twice the resolution that `_halve` reads, in pixels from the centre; half a step is its delay."""
    extent = len(SYM6) - 2
    return (torch.arange(2 * size + extent, dtype=like.dtype, device=like.device) - size - extent // 2 + 1) / 2


def _grid(draw: AugmentDraw, height: int, width: int) -> Float[Tensor, "b h2 w2 2"]:
    """Sampling grid for `grid_sample`, x, y in [-1, 1]: the place in the padded fine picture for each result pixel.

    The place p is at 2 p - 1/2 there. Plain products: a matrix product would round coordinates to 11 bits in TF32.
    """
    dx, dy = draw.shift[:, :, None, None] * TRANSLATE_STD
    x = _fine_places(width, draw.scale) - dx * width
    y = _fine_places(height, draw.scale)[:, None] - dy * height
    (xx, xy), (yx, yy) = draw.linear()[..., None, None]
    fine_width, fine_height = (2 * (3 * size - 2) for size in (width, height))
    return torch.stack([(4 * (xx * x + xy * y) - 1) / fine_width, (4 * (yx * x + yy * y) - 1) / fine_height], dim=-1)


def resample(x: Float[Tensor, "b c h w"], draw: AugmentDraw) -> Float[Tensor, "b c h w"]:
    """Scaled, stretched and shifted pictures; mirrored once beyond the border, 0 further out."""
    h, w = x.shape[2:]
    # As far as one reflection goes, whatever is drawn: a margin that fits the batch would have to be read by the host.
    fine = _double(F.pad(x, (w - 1, w - 1, h - 1, h - 1), mode="reflect"))
    moved = F.grid_sample(fine, _grid(draw, h, w).to(x.dtype), mode="bilinear", align_corners=False)
    return _halve(moved)


@dataclass(frozen=True)
class EdmAugment:
    """Callable on pictures, which it mirrors, scales, stretches and shifts, each with a probability of its own.

    Attributes:
        dim: length of the augmentation labels.
        p: probability of each scaling and of the translation; 0.12 in the CIFAR-10 MeanFlow recipe.
        mirror: probability of the mirroring, independent of `p`.

    """

    dim: ClassVar[int] = 6

    p: float = 0.12
    mirror: float = 0.5

    def __post_init__(self) -> None:
        """Check the probabilities.

        Raises:
            ValueError: for one outside [0, 1].

        """
        for name, value in vars(self).items():
            if not 0.0 <= value <= 1.0:
                raise ValueError(f"{name} is {value}, expected a probability in [0, 1]")

    def draw(self, batch: int, device: torch.device, generator: torch.Generator | None = None) -> AugmentDraw:
        """Draw the augmentation parameters of each picture."""

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, device=device, generator=generator)

        def happens(probability: float) -> Tensor:
            return (torch.rand(batch, device=device, generator=generator) < probability).float()

        angle = (2 * torch.rand(batch, device=device, generator=generator) - 1) * math.pi
        return AugmentDraw(
            happens(self.mirror),
            normal(batch) * happens(self.p),
            normal(batch) * happens(self.p),
            angle * happens(ROTATED_AXES),
            normal(2, batch) * happens(self.p),
        )

    def apply(self, x: Float[Tensor, "b c h w"], draw: AugmentDraw) -> Float[Tensor, "b c h w"]:
        """Do it; pictures that are mirrored at most keep their values exactly."""
        x = torch.where(draw.flip[:, None, None, None] > 0, x.flip(-1), x)
        still = (draw.scale == 0) & (draw.stretch == 0) & (draw.shift == 0).all(0)
        return torch.where(still[:, None, None, None], x, resample(x, draw))

    def __call__(
        self, x: Float[Tensor, "b c h w"], generator: torch.Generator | None = None
    ) -> tuple[Float[Tensor, "b c h w"], Float[Tensor, "b 6"]]:
        """Augmented pictures and their labels, on the pictures' device, without waiting for it."""
        draw = self.draw(len(x), x.device, generator)
        return self.apply(x, draw), draw.labels().to(x.dtype)
