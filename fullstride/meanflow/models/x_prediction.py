"""`model.prediction=x`: a network that predicts an image in place of a velocity (arXiv:2601.22158).

Pictures lie near a surface of few dimensions and velocities, which hold noise, do not: in pixels, a network of large
patches learns the first more easily. From its output x the average velocity is

    u(z, r, t) = (z - x) / t,

so that one step from t = 1 ends at x itself. Near t = 0 the division by `LEAST_TIME` keeps u finite; any u can still be
predicted, as z - t u is then z - LEAST_TIME u.
"""

from typing import Any

import torch
from torch import nn

from fullstride.jvp.mixed_batch import Batch

LEAST_TIME = 0.05


def predict_x(network: nn.Module) -> nn.Module:
    """The network itself, whose output is taken for images and turned into a velocity: its weights keep their names.

    Args:
        network: called as one of a velocity is, `network(z, r, t, ...)`; from then on it returns (z - x) / t, of each
            output along the channels.

    """
    network.register_forward_hook(_velocity, with_kwargs=True)
    return network


def _velocity(network: nn.Module, args: tuple[Any, ...], given: dict[str, Any], x: Batch) -> Batch:
    named = dict(zip("zrt", args, strict=False)) | given
    z, t = named["z"], named["t"]
    copies = x.shape[1] // z.shape[1]
    time = torch.clamp(t, min=LEAST_TIME)[(slice(None), *[None] * (len(z.shape) - 1))]
    return ((z if copies == 1 else torch.cat([z] * copies, dim=1)) - x) / time
