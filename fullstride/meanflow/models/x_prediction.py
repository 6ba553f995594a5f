"""`model.prediction=x`: a network that predicts an image in place of a velocity (arXiv:2601.22158).

Pictures lie near a surface of few dimensions and velocities, which hold noise, do not: in pixels, a network of large
patches learns the first more easily. From its output x the average velocity is

    u(z, r, t) = (z - x) / t,

so that one step from t = 1 ends at x itself. Near t = 0 the division by `LEAST_TIME` keeps u finite; any u can still be
predicted, as z - t u is then z - LEAST_TIME u.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fullstride.jvp.mixed_batch import Batch

LEAST_TIME = 0.05
PREFIX = "network."  # of the names of its weights


class XPrediction(nn.Module):
    """The average velocity by a network that predicts an image."""

    def __init__(self, network: nn.Module):
        """Take a network that is called as one of a velocity is."""
        super().__init__()
        self.network = network

    def forward(
        self, z: Float[Batch, "b c *s"], r: Float[Tensor, " b"], t: Float[Batch, " b"], *args: Any, **given: Any
    ) -> Float[Batch, "b d *s"]:
        """(z - x) / t of each output along the channels."""
        x = self.network(z, r, t, *args, **given)
        copies = x.shape[1] // z.shape[1]
        time = torch.clamp(t, min=LEAST_TIME)[(slice(None), *[None] * (len(z.shape) - 1))]
        return ((z if copies == 1 else torch.cat([z] * copies, dim=1)) - x) / time
