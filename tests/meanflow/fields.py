"""Velocity fields whose average velocity is known in closed form."""

import torch
from torch import Tensor, nn


class GaussianField(nn.Module):
    """Data N(mean, std^2) for each element, independently: the marginal flow is linear, so u is known exactly.

    With s(t)^2 = (1 - t)^2 std^2 + t^2 and m(t) = (1 - t) mean, the marginal velocity carries N(m(t), s(t)^2) along
    z_t = m(t) + s(t) xi, so z_r = m(r) + s(r)/s(t) (z_t - m(t)) and u = (z_t - z_r)/(t - r).
    """

    def __init__(self, mean: float = 0.7, std: float = 0.4):
        super().__init__()
        self.mean, self.std = mean, std

    def _s(self, t: Tensor) -> Tensor:
        return ((1 - t) ** 2 * self.std**2 + t**2).sqrt()

    def position(self, z: Tensor, r: Tensor, t: Tensor) -> Tensor:
        """Where the path through z at time t is at time r."""
        r, t = r[:, None, None, None], t[:, None, None, None]
        return (1 - r) * self.mean + self._s(r) / self._s(t) * (z - (1 - t) * self.mean)

    def velocity(self, z: Tensor, t: Tensor) -> Tensor:
        """dz/dt at (z, t)."""
        t = t[:, None, None, None]
        ds = (t - (1 - t) * self.std**2) / self._s(t)
        return -self.mean + ds / self._s(t) * (z - (1 - t) * self.mean)

    def forward(self, z: Tensor, r: Tensor, t: Tensor, label: Tensor | None = None) -> Tensor:
        """The average velocity over [r, t], which is the instantaneous one at r = t."""
        gap = (t - r)[:, None, None, None]
        average = (z - self.position(z, r, t)) / torch.where(gap == 0, 1.0, gap)
        return torch.where(gap == 0, self.velocity(z, t), average)


def batch_of_points(seed: int, batch: int = 7, shape: tuple[int, ...] = (3, 5, 5), dtype=torch.float64):
    """Random z, v and times r <= t away from each other and from the ends."""
    g = torch.Generator().manual_seed(seed)
    z, v = torch.randn(2, batch, *shape, generator=g, dtype=dtype)
    t = 0.5 + 0.4 * torch.rand(batch, generator=g, dtype=dtype)
    r = 0.4 * torch.rand(batch, generator=g, dtype=dtype)
    return z, v, t, r
