"""Energy distance between two sets of images."""

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from fullstride.meanflow.metrics.distances import squared_distances

# Rows of one block of pairs: 8 MiB of fp64 each, and of what they are computed from.
BLOCK = 1024


def _distance_sum(x: Tensor, y: Tensor, centre: Tensor) -> float:
    """The sum of all |x_i - y_j|."""
    total = torch.zeros_like(centre[:1])  # on the device, which nobody waits for before all are there
    for a in x.split(BLOCK):
        for b in y.split(BLOCK):
            total += _distances(a, b, centre).sum()
    return total.item()


def _own_sum(x: Tensor, centre: Tensor) -> float:
    """`_distance_sum` of a set with itself, each pair of blocks once: |x_i - x_j| is |x_j - x_i|."""
    blocks, total = x.split(BLOCK), torch.zeros_like(centre[:1])
    for i, a in enumerate(blocks):
        total += _distances(a, a, centre).sum()
        for b in blocks[i + 1 :]:
            total += 2 * _distances(a, b, centre).sum()
    return total.item()


def _distances(a: Tensor, b: Tensor, centre: Tensor) -> Tensor:
    """In fp64, of rows without a common offset, to which they would lose digits."""
    return squared_distances(a.double() - centre, b.double() - centre).sqrt()


def _rows(name: str, x: Float[Tensor, "n *d"]) -> Shaped[Tensor, "n e"]:
    """A set, checked, on its device (the CPU for MPS, which has no fp64), without a graph."""
    if len(x) < 2:
        raise ValueError(f"{name} has {len(x)} samples, expected at least 2")
    rows = x.reshape(len(x), -1)
    if bad := int((~rows.isfinite()).any(1).sum()):
        raise ValueError(f"{bad} of {len(x)} samples of {name} are not finite; the sampler or the network diverged")
    return (rows if rows.device.type != "mps" else rows.cpu()).detach()


def energy_distance(x: Float[Tensor, "n *d"], y: Float[Tensor, "m *e"], *, unbiased: bool = True) -> float:
    """2 E|X - Y| - E|X - X'| - E|Y - Y'|, Euclidean norm over all pixels (Szekely and Rizzo, 2013).

    Args:
        x: samples of one distribution.
        y: samples of the other.
        unbiased: leave each sample's distance to itself out (U-statistic): the expectation is 0 for equal
            distributions whatever the sample sizes, and values may lie below. Otherwise keep it (V-statistic): never
            negative, in one dimension the square of `scipy.stats.energy_distance`, and for equal distributions about
            E|X - X'| (1/n + 1/m).

    Raises:
        ValueError: for fewer than 2 samples, different shapes, or samples that are not finite.

    """
    unbiased_value, biased = EnergyReference(y).distances(x)
    return unbiased_value if unbiased else biased


class EnergyReference:
    """The set that others are compared with: the distances within it are summed up once.

    Attributes:
        count: its samples.

    """

    def __init__(self, y: Float[Tensor, "m *e"]):
        """Sum it up.

        Raises:
            ValueError: for fewer than 2 samples, or samples that are not finite.

        """
        self._shape, self._y = y.shape[1:], _rows("y", y)
        self._centre = self._y.mean(0, dtype=torch.float64)
        self.count, self._within = len(y), _own_sum(self._y, self._centre)

    def distances(self, x: Float[Tensor, "n *e"]) -> tuple[float, float]:
        """The U-statistic and the V-statistic of `energy_distance`, for the price of one.

        Raises:
            ValueError: as `energy_distance`.

        """
        if x.shape[1:] != self._shape:
            raise ValueError(
                f"x holds samples of shape {tuple(x.shape[1:])} and y of {tuple(self._shape)}, expected one"
            )
        x, y, centre = _rows("x", x), self._y, self._centre
        n, m = len(x), self.count
        between, within_x, within_y = 2 * _distance_sum(x, y, centre) / (n * m), _own_sum(x, centre), self._within
        return (
            between - within_x / (n * (n - 1)) - within_y / (m * (m - 1)),
            between - within_x / (n * n) - within_y / (m * m),
        )
