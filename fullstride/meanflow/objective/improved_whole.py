"""`loss=imf_whole`: improved MeanFlow with a head for v and with guidance as an input (arXiv:2512.02012).

A guidance scale w and an interval [a, b] are drawn for each sample and given to the network, which also predicts v.
With v_c and v_u the head's velocities of the class, at w, and of 'no class', at 1, the target's velocity is

    v_g = v + (1 - 1 / w) (v_c - v_u),        w = 1 for t outside [a, b] and for 'no class',

whose fixed point v_c = v + (1 - 1 / w) (v_c - v_u) is v_u + w (v - v_u), guidance of scale w. Both u and the head are
trained on it:

    ||u + (t - r) sg(du/dt) - v_g||^2  and  ||head - v_g||^2,    du/dt along v_c.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from fullstride.meanflow.models.common import evaluating
from fullstride.meanflow.objective.derivative import Velocity, velocity_and_some_derivatives
from fullstride.meanflow.objective.improved import ImprovedMeanFlow
from fullstride.meanflow.objective.loss import squared_error
from fullstride.meanflow.objective.shapes import PathBatch, over_elements
from fullstride.settings.fields import Conflict, Finite, Rule

Scale = Annotated[float, Rule("a finite number, at least 1", lambda x: 1 <= x < math.inf)]


@dataclass(frozen=True)
class WholeImprovedMeanFlow(ImprovedMeanFlow):
    """Improved MeanFlow of a network that is called as `MiT`.

    Attributes:
        largest_scale: w is drawn from [1, largest_scale], with density proportional to w^-scale_power.
        scale_power: see `largest_scale`.

    """

    conflicts: ClassVar[tuple[Conflict, ...]] = (
        *ImprovedMeanFlow.conflicts,
        Conflict(
            "loss model",
            lambda c: not hasattr(c.model, "head_blocks") and ":" not in c.model.name,
            "model=mit_b2 or another network with a head for v; or loss=imf",
        ),
        Conflict(
            "loss loss.jvp_backend",
            lambda c: c.loss.jvp_backend != "func",
            "loss.jvp_backend=func, as u and v come of one pass",
        ),
        Conflict(
            "loss loss.omega loss.kappa loss.guidance_start loss.guidance_end",
            lambda c: c.loss.guided or (c.loss.guidance_start, c.loss.guidance_end) != (0, 1),
            "none of them, as the network is given them; loss.largest_scale bounds the scale",
        ),
        Conflict(
            "loss.label_dropout model.class_conditional",
            lambda c: c.model.class_conditional and c.loss.label_dropout == 0,
            "loss.label_dropout above 0, such as 0.1, with classes",
        ),
    )
    # Forward passes without gradient over the whole batch, where there are classes.
    passes_of_all: ClassVar[int] = 2

    largest_scale: Scale = 8.0
    scale_power: Finite = 1.0

    def draw_inputs(
        self,
        x: Float[Tensor, "b *s"],
        t: Float[Tensor, " b"],
        r: Float[Tensor, " b"],
        generator: torch.Generator | None = None,
    ) -> dict[str, Float[Tensor, " b"]]:
        """Scales and intervals, for each t where r = t; none without classes."""
        if self.guidance is None:
            return {}
        place, start, end = torch.rand(3, len(x), generator=generator, device=x.device, dtype=t.dtype)
        flow = r == t
        return {
            "omega": self.scale_at(place),
            "start": torch.where(flow, 0.0, start / 2),
            "end": torch.where(flow, 1.0, (1 + end) / 2),
        }

    def scale_at(self, place: Float[Tensor, " b"]) -> Float[Tensor, " b"]:
        """The scale below which lies a share `place` of all: the inverse of the distribution's integral."""
        most, other = math.log(self.largest_scale), 1 - self.scale_power
        if other == 0:
            return torch.exp(place * most)
        return torch.exp(torch.log1p(place * math.expm1(other * most)) / other)

    def _errors(self, model: Velocity, path: PathBatch) -> tuple[Float[Tensor, " b"], ...]:
        with torch.no_grad(), evaluating(model):
            path, moving = self._guided(model, path)
        given, n, channels = path.conditions, path.count, path.z.shape[1]
        call = partial(model, both=True)
        head, rest = path.part(slice(n)), path.part(slice(n, None))
        if self._shares(model, path.z, path.r, path.t, path.v, given, n):
            r = torch.cat([head.r, rest.t])
            out, slope = velocity_and_some_derivatives(call, path.z, r, path.t, moving, given)
        else:
            parts, slope = [], path.z.new_zeros(0)
            if n:
                out, slope = self.velocity_and_derivative(call, head.z, head.r, head.t, moving, head.conditions)
                parts.append(out)
            if len(rest.z):
                parts.append(call(rest.z, rest.t, rest.t, **rest.conditions))
            out = torch.cat(parts)
        target = torch.cat([self._target(head, slope[:, :channels]), rest.v]) if n else path.v
        u, v = out.chunk(2, dim=1)
        return squared_error(u, target), squared_error(v, path.v)

    def _guided(self, model: Velocity, path: PathBatch) -> tuple[PathBatch, Tensor]:
        """The samples with the velocities of the guided flow, and those along which u is differentiated."""
        z, t, n, given = path.z, path.t, path.count, dict(path.conditions)
        if "omega" not in given:
            return path, self._velocity(model, z[:n], t[:n], {k: x[:n] for k, x in given.items()})
        assert self.guidance is not None
        given |= {"start": torch.zeros_like(t), "end": torch.ones_like(t)}
        none = torch.full_like(given["label"], self.guidance.num_classes)
        without = given | {"label": none, "omega": torch.ones_like(t)}
        twice = {k: torch.cat([x, without[k]]) for k, x in given.items()}
        named, free = self._velocity(model, torch.cat([z, z]), torch.cat([t, t]), twice).chunk(2)
        holds = (t >= path.conditions["start"]) & (t <= path.conditions["end"]) & (given["label"] != none)
        omega = torch.where(holds, given["omega"], 1.0)
        guided = path.v + over_elements(1 - 1 / omega, z) * (named - free)
        moved = {k: x[:n] for k, x in (given | {"omega": omega}).items()}
        found = replace(path, v=guided.to(z.dtype))
        return found, self._velocity(model, z[:n], t[:n], moved)

    def _velocity(self, model: Velocity, z: Tensor, t: Tensor, given: dict[str, Tensor]) -> Tensor:
        return model(z, t, t, **given, both=True).chunk(2, dim=1)[1].to(z.dtype)
