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


def moments(x: Float[Tensor, "n d"]) -> tuple[Float64[Tensor, " d"], Float64[Tensor, "d d"]]:
    """Mean and unbiased covariance of features, on their device (the CPU for MPS, which has no fp64).

    In two passes, so that a mean far from zero costs no digits.
    """
    parts = (x.cpu() if x.device.type == "mps" else x).split(BLOCK)
    mean = parts[0].new_zeros(x.shape[1], dtype=torch.float64)
    scatter = mean.new_zeros(len(mean), len(mean))
    for part in parts:
        mean += part.double().sum(0)
    mean /= len(x)
    for part in parts:
        centred = part.double() - mean
        scatter += centred.T @ centred
    return mean, scatter / (len(x) - 1)


def _root(c: Tensor) -> Tensor:
    """The square root of a symmetric positive semi-definite matrix; rounding's negative eigenvalues count as 0."""
    values, vectors = torch.linalg.eigh(c)
    return vectors * values.clamp(min=0).sqrt() @ vectors.T


def frechet_distance(x: Float[Tensor, "n d"], y: Float[Tensor, "m e"]) -> float:
    """|mu_x - mu_y|^2 + tr(C_x + C_y - 2 (C_x C_y)^(1/2)) of Gaussians fitted to both (arXiv:1706.08500, equation 6).

    The trace of the root is the sum of the singular values of C_x^(1/2) C_y^(1/2), in fp64: unlike the roots of
    eigenvalues, they keep rounding where covariances are singular at rounding's own size.

    Args:
        x: one set of features.
        y: the other, on the same device.

    Raises:
        ValueError: for fewer than 2 samples, different numbers of features, or features that are not finite.

    """
    check_pair(x, y)
    (mean_x, cov_x), (mean_y, cov_y) = moments(x), moments(y)
    cross = torch.linalg.svdvals(_root(cov_x) @ _root(cov_y)).sum()
    return ((mean_x - mean_y).square().sum() + cov_x.trace() + cov_y.trace() - 2 * cross).item()
