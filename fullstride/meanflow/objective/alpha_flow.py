"""`loss=alphaflow`: from flow matching to MeanFlow by differences of a falling step (arXiv:2510.20771).

Over the last share a of the interval, d = a (t - r), take the velocity to be v; before it, the network's own average:

    u_tgt = a v + (1 - a) sg u(z - d v, r, t - d).

With D = (u(z, r, t) - u(z - d v, r, t - d)) / d, the derivative along v by a backward difference, this is

    u - u_tgt = a (u - (v - (1 - a) (t - r) D)),

a times the error of MeanFlow's loss with (1 - a) D in du/dt's place. That error is what is weighed here. At a = 1 it is
flow matching for each (r, t); as a falls to 0, D becomes du/dt. The paper's weight a / (||u - u_tgt||^2 + c) has the
gradient of ours with power 1 and c / a^2 for c.
"""

import math
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from fullstride.meanflow.objective.derivative import Velocity, compiled, same_randomness
from fullstride.meanflow.objective.loss import CONFLICTS, MeanFlowLoss, squared_error
from fullstride.meanflow.objective.shapes import PathBatch, like, over_elements
from fullstride.settings.fields import AllowedNames, Conflict, PartShare, Share

FORMS = ("flow", "discrete", "exact")
LEAST_IN_BF16 = 0.05  # the difference's rounding, 2^-8 of u, is divided by a


@dataclass(frozen=True)
class AlphaFlow(MeanFlowLoss):
    """MeanFlow by a schedule of a: 1, then a sigmoid curve, then the exact derivative.

    Attributes:
        flow_until: share of the run up to which a is 1.
        exact_from: share of the run from which du/dt is exact.
        least_alpha: a at the end of the curve, and 1 - a at its start.
        form: where in the schedule this loss stands: `flow`, `discrete` or `exact`.

    """

    conflicts: ClassVar[tuple[Conflict, ...]] = (
        *CONFLICTS,
        Conflict(
            "loss.flow_until loss.exact_from",
            lambda c: c.loss.flow_until >= c.loss.exact_from,
            "a flow_until below exact_from",
        ),
        Conflict(
            "loss.tangent_warmup loss",
            lambda c: c.loss.tangent_warmup > 0,
            "loss.tangent_warmup=0, as loss.flow_until and loss.exact_from are its schedule; or loss=meanflow",
        ),
        Conflict(
            "precision loss.least_alpha",
            lambda c: c.precision == "bf16" and c.loss.least_alpha < LEAST_IN_BF16,
            f"at least {LEAST_IN_BF16} with bf16, whose rounding a difference over a smaller step would be made of",
        ),
        Conflict(
            "backend loss model.dropout",
            lambda c: compiled(c) and getattr(c.model, "dropout", 0) > 0,
            "backend=eager or model.dropout=0: when compiled, the two ends of a difference would drop different units",
        ),
    )

    flow_until: Share = 0.1
    exact_from: Share = 0.6
    least_alpha: PartShare = 0.005
    form: Annotated[str, AllowedNames(FORMS)] = "flow"

    @property
    def scheduled(self) -> bool:
        """Tell whether the loss needs the share of the run that is done."""
        return self.form == "discrete"

    def form_at(self, progress: float) -> "MeanFlowLoss":
        """The loss for that part of a run."""
        form = FORMS[(progress >= self.flow_until) + (progress >= self.exact_from)]
        return self if form == self.form else replace(self, form=form)

    def alpha(self, progress: Float[Tensor, " b"]) -> Float[Tensor, " b"]:
        """a on its curve: 1 - least_alpha at `flow_until`, 1/2 halfway, least_alpha at `exact_from`."""
        place = ((progress - self.flow_until) / (self.exact_from - self.flow_until)).clamp(0, 1)
        return torch.sigmoid(math.log(1 / self.least_alpha - 1) * (1 - 2 * place))

    def _errors(self, model: Velocity, path: PathBatch) -> tuple[Float[Tensor, " b"], ...]:
        if self.form == "exact":
            return super()._errors(model, path)
        n = path.count
        if self.form == "flow" or n == 0:
            r = torch.cat([path.r[:n], path.t[n:]])
            return (squared_error(like(path.z, model(path.z, r, path.t, **path.conditions)), path.v),)
        head, rest = path.part(slice(n)), path.part(slice(n, None))
        errors = [self._discrete(model, head)]
        if len(rest.z):
            errors.append(squared_error(like(rest.z, model(rest.z, rest.t, rest.t, **rest.conditions)), rest.v))
        return (torch.cat(errors),)

    def _discrete(self, model: Velocity, path: PathBatch) -> Float[Tensor, " b"]:
        """The errors of samples whose derivative is a difference.

        Raises:
            ValueError: without progress.

        """
        if path.progress is None:
            raise ValueError("loss=alphaflow without progress, expected the share of the run that is done")
        alpha = self.alpha(path.progress).to(path.z.dtype)
        step = alpha * (path.t - path.r)
        moving = self._moving(model, path.z, path.t, path.v, path.conditions)
        with torch.no_grad(), same_randomness(path.z):
            earlier = path.z - over_elements(step, path.z) * moving
            before = like(path.z, model(earlier, path.r, path.t - step, **path.conditions))
        u = like(path.z, model(path.z, path.r, path.t, **path.conditions))
        # Where the times meet there is no interval: 0 / 0.
        factor = torch.where(step > 0, (1 - alpha) / torch.where(step > 0, step, 1), 0)
        return squared_error(u, self._target(path, over_elements(factor, u) * (u.detach() - before)))
