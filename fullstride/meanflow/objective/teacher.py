"""`loss.tangent=teacher`: a pretrained flow gives the velocity of the target and of the tangent (arXiv:2511.13019).

A sample's e - x is one of many velocities that lead through z. A trained flow-matching network knows their mean
v(z, t), the velocity of the flow itself, so that with

    u_tgt = v(z, t) - (t - r) du/dt,    du/dt along v(z, t),

the target is a function of z alone, without the noise of one sample's velocity. Its fixed point is the average velocity
of the teacher's flow: u + (t - r) du/dt = v along that flow is the derivative of (t - r) u = integral of v.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from fullstride.meanflow.models.common import evaluating
from fullstride.meanflow.objective.derivative import Conditions, Velocity
from fullstride.meanflow.objective.shapes import like, over_elements
from fullstride.settings.fields import Conflict, Finite, Share, check

CONFLICTS = (
    Conflict(
        "loss.tangent loss.teacher",
        lambda c: c.loss.tangent == "teacher" and not c.loss.teacher,
        "loss.teacher=RUN, the folder of a trained run or of one of its checkpoints",
    ),
    Conflict(
        "loss loss.tangent loss.teacher",
        lambda c: bool(c.loss.teacher) and not c.loss.taught,
        "loss.tangent=teacher with a teacher; or leave loss.teacher out",
    ),
    Conflict(
        "loss.teacher loss.teacher_ema loss.teacher_guidance",
        lambda c: not c.loss.teacher and (c.loss.teacher_ema != 0 or c.loss.teacher_guidance != 1),
        "a teacher that they are for; or leave them out",
    ),
    Conflict(
        "loss.teacher loss.omega loss.kappa loss.label_dropout",
        lambda c: bool(c.loss.teacher) and (c.loss.guided or c.loss.label_dropout > 0),
        "the teacher's own guidance, loss.teacher_guidance, and no label_dropout",
    ),
    Conflict(
        "loss.teacher_guidance model.class_conditional",
        lambda c: c.loss.teacher_guidance != 1 and not c.model.class_conditional,
        "model.class_conditional=true with guidance",
    ),
)


@dataclass(frozen=True)
class Teacher:
    """A pretrained velocity field, called as the trained network is: `network(z, t, t, **conditions)`.

    Attributes:
        network: the pretrained network; it is never changed.
        num_classes: number of its classes, which as a label stands for 'no class'; 0 for an unconditional one.
        scale: w of v(no class) + w (v(class) - v(no class)); 1 is the teacher's own velocity.
        start: guidance holds for t in [start, end]; elsewhere the velocity is the teacher's own.
        end: see start.

    """

    network: Velocity
    num_classes: int = 0
    scale: Finite = 1.0
    start: Share = 0.0
    end: Share = 1.0

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            ValueError: for one out of its range, an interval that ends before it starts, or guidance without classes.

        """
        check(self)
        if self.start > self.end:
            raise ValueError(f"start is {self.start}, end {self.end}: expected a start no larger than the end")
        if self.scale != 1 and self.num_classes < 1:
            raise ValueError(f"scale is {self.scale} for a teacher without classes, expected 1")

    @torch.no_grad()
    def velocity(
        self, z: Float[Tensor, "b *s"], t: Float[Tensor, " b"], conditions: Conditions
    ) -> Float[Tensor, "b *s"]:
        """The velocity of the teacher's flow at (z, t), without gradient, in z's number format.

        Raises:
            ValueError: for guidance without labels, or a teacher whose output is not of z's shape.

        """
        with evaluating(self.network):
            own = like(z, self.network(z, t, t, **conditions), "the teacher's output")
            if self.scale == 1:
                return own.to(z.dtype)
            if "label" not in conditions:
                raise ValueError("the teacher is guided, but the batch has no labels; pass label, or use scale=1")
            none = dict(conditions) | {"label": torch.full_like(conditions["label"], self.num_classes)}
            without = self.network(z, t, t, **none)
        holds = (t >= self.start) & (t <= self.end)
        return torch.where(over_elements(holds, z), without + self.scale * (own - without), own).to(z.dtype)
