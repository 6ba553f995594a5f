"""Augmentation with labels, as EDM trains CIFAR-10 (arXiv:2206.00364, appendix F.2): the network is told what was done.

Mirroring, isotropic and anisotropic scaling and fractional translation; the MeanFlow recipe leaves out EDM's vertical
mirroring and rotation. The geometry is one resampling at twice the resolution, between two passes of the sym6 wavelet's
low-pass filter, so that no frequencies fold over.
"""

import math
from dataclasses import dataclass

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
# Half the filter's reach at the coarse resolution: what the resampled picture must hold beyond its border.
REACH = len(SYM6) // 4
SCALE_STD = 0.2  # of the logarithm to base 2, for both scalings
TRANSLATE_STD = 0.125  # in units of the picture's size
ROTATED_AXES = 0.5  # probability that anisotropic scaling has axes of its own


@dataclass(frozen=True)
class Draw:
    """What is done to each picture; zeros do nothing.

    Attributes:
        flip: 1 mirrors left to right.
        scale: log2 of the enlargement, in units of 0.2.
        stretch: log2 of the enlargement along one axis and of the shrinking along the other, in units of 0.2.
        angle: of that axis, in radians.
        shift: to the right and downwards, in units of an eighth of the size.

    """

    flip: Float[Tensor, " b"]
    scale: Float[Tensor, " b"]
    stretch: Float[Tensor, " b"]
    angle: Float[Tensor, " b"]
    shift: Float[Tensor, "2 b"]

    def labels(self) -> Float[Tensor, "b 6"]:
        """What the network is told."""
        parts = [self.flip, self.scale, self.stretch * self.angle.cos(), self.stretch * self.angle.sin(), *self.shift]
        return torch.stack(parts, dim=1)


def _matrix(rows: list[list[Tensor | float]], like: Tensor) -> Float[Tensor, "b 3 3"]:
    """One 3x3 matrix for each entry of `like`."""
    full = [value if isinstance(value, Tensor) else torch.full_like(like, value) for row in rows for value in row]
    return torch.stack(full, dim=1).unflatten(1, (3, 3))


def _scaling(x: Tensor, y: Tensor) -> Tensor:
    return _matrix([[x, 0.0, 0.0], [0.0, y, 0.0], [0.0, 0.0, 1.0]], x)


def _rotation(angle: Tensor) -> Tensor:
    c, s = angle.cos(), angle.sin()
    return _matrix([[c, -s, 0.0], [s, c, 0.0], [0.0, 0.0, 1.0]], angle)


def _translation(x: Tensor, y: Tensor) -> Tensor:
    return _matrix([[1.0, 0.0, x], [0.0, 1.0, y], [0.0, 0.0, 1.0]], x)


def _sources(draw: Draw, height: int, width: int) -> Float[Tensor, "b 3 3"]:
    """From a pixel of the result to where it comes from, both from the picture's centre."""
    grow, stretch = (SCALE_STD * draw.scale).exp2(), (SCALE_STD * draw.stretch).exp2()
    shift_x, shift_y = draw.shift[0] * width * TRANSLATE_STD, draw.shift[1] * height * TRANSLATE_STD
    turned = _rotation(-draw.angle) @ _scaling(1 / stretch, stretch) @ _rotation(draw.angle)
    return _scaling(1 / grow, 1 / grow) @ turned @ _translation(-shift_x, -shift_y)


def _along(x: Tensor, taps: Tensor, axis: int, stride: int, padding: int) -> Tensor:
    """Correlate every channel with the taps along height (2) or width (3)."""
    vertical = axis == 2
    kernel = taps.view(1, 1, *((-1, 1) if vertical else (1, -1))).expand(x.shape[1], -1, -1, -1)
    strides, paddings = ((stride, 1), (padding, 0)) if vertical else ((1, stride), (0, padding))
    return F.conv2d(x, kernel, stride=strides, padding=paddings, groups=x.shape[1])


def _enlarge(x: Tensor, taps: Tensor, axis: int) -> Tensor:
    """Twice as long along an axis: zeros in between, then the low-pass filter."""
    spread = torch.stack([x, torch.zeros_like(x)], dim=axis + 1).flatten(axis, axis + 1)
    spread = spread.narrow(axis, 0, 2 * x.shape[axis] - 1)
    return _along(spread, taps.flip(0), axis, stride=1, padding=(len(SYM6) + 1) // 2)


def _reduce(x: Tensor, taps: Tensor, axis: int) -> Tensor:
    """Half as long along an axis, without what the filter saw of the border."""
    half = _along(x, taps, axis, stride=2, padding=(len(SYM6) - 1) // 2)
    return half.narrow(axis, REACH, half.shape[axis] - 2 * REACH)


def resample(x: Float[Tensor, "b c h w"], sources: Float[Tensor, "b 3 3"]) -> Float[Tensor, "b c h w"]:
    """Pictures whose pixel p, from the centre, shows what was at `sources` p; mirrored once beyond the border."""
    b, c, h, w = x.shape
    taps = torch.tensor(SYM6, dtype=x.dtype, device=x.device)
    # As far as one reflection goes, whatever is drawn: a margin that fits the batch would have to be read by the host.
    fine = F.pad(x, (w - 1, w - 1, h - 1, h - 1), mode="reflect")
    fine = _enlarge(_enlarge(fine, taps, 3), taps, 2)
    one = torch.ones_like(sources[:, 0, 0])
    # A place p at the coarse resolution is 2 p - 1/2 at the fine one: half a pixel is the filter's delay.
    to_fine = _translation(-0.5 * one, -0.5 * one) @ _scaling(2 * one, 2 * one)
    from_fine = _scaling(one / 2, one / 2) @ _translation(0.5 * one, 0.5 * one)
    out_h, out_w = 2 * (h + 2 * REACH), 2 * (w + 2 * REACH)
    theta = to_fine @ sources @ from_fine
    theta = (
        _scaling(2 / fine.shape[3] * one, 2 / fine.shape[2] * one) @ theta @ _scaling(out_w / 2 * one, out_h / 2 * one)
    )
    grid = F.affine_grid(theta[:, :2], [b, c, out_h, out_w], align_corners=False)
    moved = F.grid_sample(fine, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
    return _reduce(_reduce(moved, taps, 3), taps, 2)


@dataclass(frozen=True)
class EdmAugment:
    """Callable on pictures; every operation but the mirroring happens with probability `p`.

    Attributes:
        p: probability of each scaling and of the translation; 0.12 in the CIFAR-10 MeanFlow recipe. Mirroring has 1/2.

    """

    p: float = 0.12

    @property
    def dim(self) -> int:
        """Length of the labels."""
        return 6

    def draw(self, batch: int, device: torch.device, generator: torch.Generator | None = None) -> Draw:
        """Decide what is done to each picture."""

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, device=device, generator=generator)

        def happens(probability: float) -> Tensor:
            return (torch.rand(batch, device=device, generator=generator) < probability).float()

        angle = (2 * torch.rand(batch, device=device, generator=generator) - 1) * math.pi
        return Draw(
            happens(0.5),
            normal(batch) * happens(self.p),
            normal(batch) * happens(self.p),
            angle * happens(ROTATED_AXES),
            normal(2, batch) * happens(self.p),
        )

    def apply(self, x: Float[Tensor, "b c h w"], draw: Draw) -> Float[Tensor, "b c h w"]:
        """Do it; pictures that are only mirrored keep their values exactly."""
        x = torch.where(draw.flip[:, None, None, None] > 0, x.flip(-1), x)
        moved = resample(x, _sources(draw, *x.shape[2:]))
        still = (draw.scale == 0) & (draw.stretch == 0) & (draw.shift == 0).all(0)
        return torch.where(still[:, None, None, None], x, moved)

    def __call__(
        self, x: Float[Tensor, "b c h w"], generator: torch.Generator | None = None
    ) -> tuple[Float[Tensor, "b c h w"], Float[Tensor, "b 6"]]:
        """Augmented pictures and their labels, on the pictures' device, without waiting for it."""
        draw = self.draw(len(x), x.device, generator)
        return self.apply(x, draw), draw.labels().to(x.dtype)
