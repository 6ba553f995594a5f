"""`loss=tvm`: terminal velocity matching, with the gradient through the derivative in r (arXiv:2511.19797).

The network's step from t to r ends at f(r) = z - (t - r) u(z, r, t). As r moves, f must move as the flow does there:

    df/dr = u - (t - r) du/dr = v(f, r),    f(t) = z,

which is the flow's own equation and start, so that u is its average velocity. v is u(f, r, r) of the first moving
average, without gradient; at r = t the network is trained on e - x. Unlike in MeanFlow's loss, the derivative is part
of what is trained: the gradient goes through it.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from fullstride.jvp import jvp
from fullstride.meanflow.models.common import evaluating
from fullstride.meanflow.objective.derivative import Velocity
from fullstride.meanflow.objective.improved import AverageMeanFlow
from fullstride.meanflow.objective.loss import squared_error
from fullstride.meanflow.objective.shapes import PathBatch, like, over_elements
from fullstride.settings.fields import Conflict


@dataclass(frozen=True)
class TerminalVelocityMatching(AverageMeanFlow):
    """Terminal velocity matching of the samples with r != t, and flow matching of the others."""

    conflicts: ClassVar[tuple[Conflict, ...]] = (
        *AverageMeanFlow.conflicts,
        Conflict(
            "loss loss.jvp_backend loss.jvp_chunk loss.split",
            lambda c: (c.loss.jvp_backend, c.loss.jvp_chunk) != ("func", 0) or c.loss.split not in ("auto", "static"),
            "loss.jvp_backend=func, loss.jvp_chunk=0, loss.split=static: the gradient goes through the derivative",
        ),
        Conflict(
            "loss loss.tangent_warmup loss.tangent_limit",
            lambda c: c.loss.tangent_warmup > 0 or c.loss.tangent_limit > 0,
            "neither, as its derivative is no target; leave them out",
        ),
    )

    def _errors(self, model: Velocity, path: PathBatch) -> tuple[Float[Tensor, " b"], ...]:
        n = path.count
        head, rest, errors = path.part(slice(n)), path.part(slice(n, None)), []
        if n:
            errors.append(self._terminal(model, head))
        if n < len(path.z):
            u = model(rest.z, rest.t, rest.t, **rest.conditions)
            errors.append(squared_error(like(rest.z, u), rest.v))
        return (torch.cat(errors),)

    def _terminal(self, model: Velocity, path: PathBatch) -> Float[Tensor, " n"]:
        """||df/dr - v(f, r)||^2 of each sample."""
        step = lambda r: model(path.z, r, path.t, **path.conditions)  # noqa: E731
        u, slope = jvp(step, (path.r,), (torch.ones_like(path.r),), tangent_grad=True)
        gap = over_elements(path.t - path.r, path.z)
        network = model if self.average is None else self.average
        with torch.no_grad(), evaluating(network):
            end = path.z - gap * like(path.z, u)
            v = like(path.z, network(end, path.r, path.r, **path.conditions))
        return squared_error(u - gap * slope, v)
