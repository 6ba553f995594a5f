"""Improved precision and recall: how much of what is generated looks real, and how much of the real is generated."""

import torch
from jaxtyping import Float
from torch import Tensor

from fullstride.meanflow.metrics.rows import BLOCK, as_rows, squared_distances


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
