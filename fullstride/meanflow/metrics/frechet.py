"""Frechet distance between two sets of features.

The value depends on how many samples it was made from: equal distributions score above 0 by an amount that falls like
1/n (arXiv:1911.07023). Values compare only at equal counts, so every value carries its counts.
"""

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from fullstride.meanflow.metrics.rows import check_pair

# Rows that are copied to fp64 at a time.
BLOCK = 8192


class Moments:
    """Mean and covariance of features that arrive in batches, in fp64.

    A batch's own moments are merged into the running ones (Chan, Golub and LeVeque, 1979), so that neither the number
    of batches nor a mean far from zero costs digits.

    Attributes:
        count: samples so far.
        mean: their mean.
        scatter: the sum of (x - mean)(x - mean)^T.

    """

    def __init__(self, dim: int, device: torch.device | str = "cpu"):
        """Start without samples."""
        self.count = 0
        self.mean = torch.zeros(dim, dtype=torch.float64, device=device)
        self.scatter = torch.zeros(dim, dim, dtype=torch.float64, device=device)

    @classmethod
    def of(cls, x: Float[Tensor, "n d"]) -> "Moments":
        """The moments of one set of features, on its device (the CPU for MPS, which has no fp64)."""
        x = x.cpu() if x.device.type == "mps" else x
        moments = cls(x.shape[1], x.device)
        for part in x.split(BLOCK):
            moments.update(part)
        return moments

    def update(self, x: Float[Tensor, "n d"]) -> None:
        """Take a batch in.

        Raises:
            ValueError: for another number of features, or features that are not finite.

        """
        if x.shape[1] != len(self.mean):
            raise ValueError(f"a batch has {x.shape[1]} features, expected {len(self.mean)} as before it")
        if not x.isfinite().all():
            raise ValueError("the batch holds features that are not finite; check the images they were made from")
        if not len(x):
            return
        x = x.to(self.mean.device).double()
        total = self.count + len(x)
        mean = x.mean(0)
        shift, centred = mean - self.mean, x - mean
        self.scatter += centred.T @ centred + shift.outer(shift) * (self.count * len(x) / total)
        self.mean += shift * (len(x) / total)
        self.count = total

    @property
    def covariance(self) -> Float64[Tensor, "d d"]:
        """The unbiased covariance.

        Raises:
            ValueError: for fewer than 2 samples.

        """
        if self.count < 2:
            raise ValueError(f"there are {self.count} samples, expected at least 2 for a covariance")
        return self.scatter / (self.count - 1)


def _root(c: Tensor) -> Tensor:
    """The square root of a symmetric positive semi-definite matrix; rounding's negative eigenvalues count as 0."""
    values, vectors = torch.linalg.eigh(c)
    return vectors * values.clamp(min=0).sqrt() @ vectors.T


def frechet_from_moments(
    mean_x: Float[Tensor, " d"], cov_x: Float[Tensor, "d d"], mean_y: Float[Tensor, " e"], cov_y: Float[Tensor, "e e"]
) -> float:
    """|mu_x - mu_y|^2 + tr(C_x + C_y - 2 (C_x C_y)^(1/2)) of two Gaussians (arXiv:1706.08500, equation 6).

    The trace of the root is the sum of the singular values of C_x^(1/2) C_y^(1/2), in fp64: unlike the roots of
    eigenvalues, they keep rounding where covariances are singular at rounding's own size.

    Args:
        mean_x: mean of one set of features.
        cov_x: its unbiased covariance.
        mean_y: mean of the other.
        cov_y: its unbiased covariance.

    Raises:
        ValueError: for different numbers of features.

    """
    if len(mean_x) != len(mean_y):
        raise ValueError(f"x has {len(mean_x)} features and y {len(mean_y)}, expected the same")
    mean_x, cov_x, mean_y, cov_y = (m.double() for m in (mean_x, cov_x, mean_y, cov_y))
    cross = torch.linalg.svdvals(_root(cov_x) @ _root(cov_y)).sum()
    return ((mean_x - mean_y).square().sum() + cov_x.trace() + cov_y.trace() - 2 * cross).item()


def frechet_distance(x: Float[Tensor, "n d"], y: Float[Tensor, "m e"]) -> float:
    """`frechet_from_moments` of Gaussians fitted to two sets of features.

    Raises:
        ValueError: for fewer than 2 samples, different numbers of features, or features that are not finite.

    """
    check_pair(x, y)
    a, b = Moments.of(x), Moments.of(y)
    return frechet_from_moments(a.mean, a.covariance, b.mean, b.covariance)
