"""Frechet distance between two sets of features."""

import torch
from jaxtyping import Float
from torch import Tensor


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    x = (x.cpu() if x.device.type == "mps" else x).double()
    return x.mean(0), torch.cov(x.T).reshape(x.shape[1], x.shape[1])


def _root(c: Tensor) -> Tensor:
    """The square root of a symmetric positive semi-definite matrix; rounding's negative eigenvalues count as 0."""
    values, vectors = torch.linalg.eigh(c)
    return vectors * values.clamp(min=0).sqrt() @ vectors.T


def frechet_distance(x: Float[Tensor, "n d"], y: Float[Tensor, "m e"]) -> float:
    """|mu_x - mu_y|^2 + tr(C_x + C_y - 2 (C_x C_y)^(1/2)) of Gaussians fitted to both (arXiv:1706.08500, equation 6).

    The trace of the root is the sum of the singular values of C_x^(1/2) C_y^(1/2), in fp64: unlike the roots of
    eigenvalues, they keep rounding where covariances are singular at rounding's own size.

    Raises:
        ValueError: for fewer than 2 samples, different numbers of features, or features that are not finite.

    """
    if x.shape[1] != y.shape[1]:
        raise ValueError(f"x has {x.shape[1]} features and y {y.shape[1]}, expected the same")
    for name, sample in (("x", x), ("y", y)):
        if len(sample) < 2:
            raise ValueError(f"{name} has {len(sample)} samples, expected at least 2")
        if not sample.isfinite().all():
            raise ValueError(f"{name} holds features that are not finite; check the images they were made from")
    (mean_x, cov_x), (mean_y, cov_y) = _moments(x), _moments(y)
    cross = torch.linalg.svdvals(_root(cov_x) @ _root(cov_y)).sum()
    return ((mean_x - mean_y).square().sum() + cov_x.trace() + cov_y.trace() - 2 * cross).item()
