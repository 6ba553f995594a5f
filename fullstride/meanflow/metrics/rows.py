"""Two sets of features: what they must be to be compared, and their rows in fp64 for the metrics of pairs."""

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
