"""Distances between two sets of features: Frechet distance, kernel distance, precision and recall.

A Frechet distance depends on how many samples it was made from: equal distributions score above 0 by an amount that
falls like 1/n (arXiv:1911.07023). Values compare only at equal counts, so every value carries its counts.
"""

import torch
from jaxtyping import Float, Float64
from torch import Tensor

# Rows of one block of pairs: 32 MiB of fp64 each.
BLOCK = 2048
EPS = torch.finfo(torch.float64).eps


def check_pair(x: Float[Tensor, "n d"], y: Float[Tensor, "m e"], *, least: int = 2) -> None:
    """Check that two sets of features can be compared.

    Raises:
        ValueError: for fewer than `least` samples, different numbers of features, or features that are not finite.

    """
    if x.shape[1] != y.shape[1]:
        raise ValueError(f"x has {x.shape[1]} features and y {y.shape[1]}, expected the same")
    for name, sample in (("x", x), ("y", y)):
        if len(sample) < least:
            raise ValueError(f"{name} has {len(sample)} samples, expected at least {least}")
        if not sample.isfinite().all():
            raise ValueError(f"{name} holds features that are not finite; check the images they were made from")


def squared_distances(a: Float64[Tensor, "n d"], b: Float64[Tensor, "m d"]) -> Float64[Tensor, "n m"]:
    """|a_i - b_j|^2 as a product of matrices; what its rounding cannot tell from equal rows is 0.

    Off by no more than (d + 2) EPS (|a_i|^2 + |b_j|^2): take a common offset off both first.
    """
    norms = a.square().sum(1)[:, None] + b.square().sum(1)
    squared = torch.addmm(norms, a, b.T, alpha=-2)
    return torch.where(squared <= (a.shape[1] + 2) * EPS * norms, 0.0, squared)


def as_rows(
    x: Float[Tensor, "n d"], y: Float[Tensor, "m e"], *, least: int = 2
) -> tuple[Float64[Tensor, "n d"], Float64[Tensor, "m e"]]:
    """Both sets, checked, in fp64 on their device (the CPU for MPS, which has no fp64)."""
    check_pair(x, y, least=least)
    x, y = (s.cpu() if s.device.type == "mps" else s for s in (x, y))
    return x.double(), y.double()


# Rows that a Frechet distance copies to fp64 at a time.
COPIED = 8192


def moments(x: Float[Tensor, "n d"]) -> tuple[Float64[Tensor, " d"], Float64[Tensor, "d d"]]:
    """Mean and unbiased covariance of features, on their device (the CPU for MPS, which has no fp64).

    In two passes, so that a mean far from zero costs no digits.
    """
    parts = (x.cpu() if x.device.type == "mps" else x).split(COPIED)
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


def _kernel_sum(x: Tensor, y: Tensor) -> float:
    """The sum of (x_i . y_j / d + 1)^3 over all pairs."""
    total = x.new_zeros(())
    for a in x.split(BLOCK):
        for b in y.split(BLOCK):
            total += (a @ b.T / x.shape[1] + 1).pow(3).sum()
    return total.item()


def kernel_distance(x: Float[Tensor, "n d"], y: Float[Tensor, "m e"]) -> float:
    """The unbiased squared maximum mean discrepancy under the cubic kernel (arXiv:1801.01401, section 4), in fp64.

    Its expectation is 0 for equal distributions whatever the counts, and values may lie below. The paper averages it
    over subsets; over all pairs it estimates the same number with less variance.

    Raises:
        ValueError: for fewer than 2 samples, different numbers of features, or features that are not finite.

    """
    x, y = as_rows(x, y)
    n, m = len(x), len(y)
    own_x, own_y = ((z.square().sum(1) / z.shape[1] + 1).pow(3).sum().item() for z in (x, y))
    within_x = (_kernel_sum(x, x) - own_x) / (n * (n - 1))
    within_y = (_kernel_sum(y, y) - own_y) / (m * (m - 1))
    return within_x + within_y - 2 * _kernel_sum(x, y) / (n * m)


def _squared_radii(x: Tensor, k: int) -> Tensor:
    """The squared distance of each row to its k-th nearest other row."""
    radii = []
    for a in x.split(BLOCK):
        nearest = a.new_full((len(a), k + 1), torch.inf)
        for b in x.split(BLOCK):
            # k + 1 of them: a row is its own nearest, at distance 0.
            nearest = torch.cat([nearest, squared_distances(a, b)], 1).topk(k + 1, largest=False).values
        radii.append(nearest[:, -1])
    return torch.cat(radii)


def precision_recall(x: Float[Tensor, "n d"], y: Float[Tensor, "m e"], k: int = 3) -> tuple[float, float]:
    """Improved precision and recall (arXiv:1904.06991, equations 1 and 2), exact, in blocks, in fp64.

    A set's manifold is the union of balls around its samples, each reaching its k-th nearest neighbour. Both values
    grow with k and depend on the counts: compare at equal ones.

    Args:
        x: features of generated images.
        y: features of real images.
        k: which neighbour sets a ball's radius.

    Returns:
        Precision, the share of generated samples within the real manifold, and recall, the share of real samples
        within the generated one; from 0 to 1.

    Raises:
        ValueError: for k below 1, not more than k samples, different numbers of features, or features that are not
            finite.

    """
    if k < 1:
        raise ValueError(f"k is {k}, expected at least 1")
    x, y = as_rows(x, y, least=k + 1)
    centre = y.mean(0)
    x, y = x - centre, y - centre  # distances stay, and lose nothing to a common offset
    radii_x, radii_y = _squared_radii(x, k), _squared_radii(y, k)
    real = [torch.zeros_like(r, dtype=torch.bool) for r in radii_y.split(BLOCK)]
    precise = 0
    for a, radii_a in zip(x.split(BLOCK), radii_x.split(BLOCK), strict=True):
        inside = torch.zeros_like(radii_a, dtype=torch.bool)
        for j, (b, radii_b) in enumerate(zip(y.split(BLOCK), radii_y.split(BLOCK), strict=True)):
            squared = squared_distances(a, b)
            inside |= (squared <= radii_b).any(1)
            real[j] |= (squared <= radii_a[:, None]).any(0)
        precise += int(inside.sum())
    return precise / len(x), torch.cat(real).double().mean().item()
