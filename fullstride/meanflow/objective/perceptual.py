"""`loss=perceptual`: improved MeanFlow in pixels, with a distance of features (pMF, arXiv:2601.22158).

One step of the network from z at t ends at x_u = z - t u(z, r, t), with `model.prediction=x` its output itself. To the
squared error of u is added how far the features of that image are from those of the data x (arXiv:1801.03924, equation
1, with every weight 1):

    d(a, b) = sum over maps l of mean over places of ||f_l(a) / |f_l(a)| - f_l(b) / |f_l(b)| ||^2,

weighted as the squared error is, and left out for t above a bound, at which no image can be recognised.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from fullstride.meanflow.objective.derivative import Velocity
from fullstride.meanflow.objective.improved import ImprovedMeanFlow
from fullstride.meanflow.objective.loss import squared_error
from fullstride.meanflow.objective.shapes import PathBatch, over_elements
from fullstride.meanflow.objective.weighting import adaptive_weight
from fullstride.settings.fields import Conflict, NotNegative, Share

LEAST_LENGTH = 1e-10  # of a place's features, which may all be zero

Maps = Tensor | Sequence[Tensor]  # (b, channels, ...) each


def feature_distance(a: Maps, b: Maps) -> Float[Tensor, " b"]:
    """The squared distance of normalised features, mean over places, summed over maps; of each sample.

    Raises:
        ValueError: for maps that differ in number or shape, or have no channels.

    """
    first, second = ([x] if isinstance(x, Tensor) else list(x) for x in (a, b))
    shapes = [[tuple(x.shape) for x in maps] for maps in (first, second)]
    if not first or shapes[0] != shapes[1] or any(len(shape) < 2 for shape in shapes[0]):
        raise ValueError(
            f"features are {shapes[0]} and {shapes[1]}, expected tensors (b, channels, ...), alike in both"
        )
    apart = [(_normal(x) - _normal(y)).square().sum(1) for x, y in zip(first, second, strict=True)]
    return torch.stack([d.reshape(len(d), -1).mean(1) for d in apart]).sum(0)


def _normal(x: Float[Tensor, "b c *s"]) -> Float[Tensor, "b c *s"]:
    return x / (x.square().sum(1, keepdim=True) + LEAST_LENGTH).sqrt()


@dataclass(frozen=True)
class PerceptualMeanFlow(ImprovedMeanFlow):
    """Improved MeanFlow, with a weighted distance of features.

    Attributes:
        features: function from images in [-1, 1] to a tensor of features or several; it is never trained.
        perceptual_weight: weight of the distance.
        perceptual_until: largest t of a sample that is compared.

    """

    conflicts: ClassVar[tuple[Conflict, ...]] = (
        *ImprovedMeanFlow.conflicts,
        Conflict(
            "loss loss.omega loss.kappa",
            lambda c: c.loss.guided,
            "no guidance, whose images are not those of the data; use loss=imf",
        ),
    )

    features: Callable[[Tensor], Maps] | None = None
    perceptual_weight: NotNegative = 0.4
    perceptual_until: Share = 0.8

    def _errors(self, model: Velocity, path: PathBatch) -> tuple[Float[Tensor, " b"], ...]:
        if self.features is None:
            raise ValueError("loss=perceptual without features, expected a function from images to features")
        u, target = self._predicted(model, path)
        image = path.z - over_elements(path.t, path.z) * u
        with torch.autocast(image.device.type, enabled=False):
            with torch.no_grad():
                expected = self.features(path.x)
            return squared_error(u, target), feature_distance(self.features(image.to(path.x.dtype)), expected)

    def _weighted(self, errors: tuple[Float[Tensor, " b"], ...], path: PathBatch) -> Float[Tensor, " b"]:
        error, distance = errors
        weight = adaptive_weight(distance, self.weighting_power, self.weighting_eps) * (path.t <= self.perceptual_until)
        return super()._weighted((error,), path) + self.perceptual_weight * weight * distance
