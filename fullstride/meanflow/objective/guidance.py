"""Classifier-free guidance inside the target, so that one step generates what a guided solver would.

arXiv:2505.13447, section 4.2 and appendix B.1: the velocity of a class-conditional sample becomes

    v_g = omega v + kappa u(z, t, t | c) + (1 - omega - kappa) u(z, t, t),

whose effective scale is omega / (1 - kappa). Dropped labels train the velocity of 'no class' that it needs.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fullstride.meanflow.config.schema import LossConfig
from fullstride.meanflow.models.common import evaluating
from fullstride.meanflow.objective.derivative import Conditions, Velocity
from fullstride.meanflow.objective.shapes import like, over_elements
from fullstride.settings.fields import BelowOne, Conflict, Finite, Share, check

CONFLICTS = (
    Conflict(
        "loss.omega loss.kappa loss.label_dropout",
        lambda c: (c.loss.guided or c.loss.label_dropout > 0) and not c.model.class_conditional,
        "model.class_conditional=true with guidance",
    ),
    Conflict(
        "loss.guidance_start loss.guidance_end",
        lambda c: c.loss.guidance_start > c.loss.guidance_end,
        "a start no larger than the end",
    ),
    Conflict(
        "loss.omega loss.kappa loss.label_dropout",
        lambda c: c.loss.guided and c.loss.label_dropout == 0,
        "loss.label_dropout above 0, such as 0.1: guidance needs the velocity of 'no class', which dropped labels train"
        "",
    ),
)


@dataclass(frozen=True)
class Guidance:
    """How guidance enters the target.

    Attributes:
        num_classes: number of classes; as a label it stands for 'no class'.
        omega: weight of the sample's own velocity; 1 with kappa 0 is no guidance.
        kappa: weight of the network's class-conditional velocity.
        start: guidance holds for t in [start, end]; elsewhere the velocity stays the sample's own.
        end: see start.
        label_dropout: the probability that a sample is trained without its class, and without guidance.

    """

    num_classes: int
    omega: Finite = 1.0
    kappa: BelowOne = 0.0
    start: Share = 0.0
    end: Share = 1.0
    label_dropout: Share = 0.1

    def __post_init__(self) -> None:
        """Check what can be checked without a batch.

        Raises:
            ValueError: for a number out of its range, NaN included, or no classes.

        """
        if not self.num_classes >= 1:
            raise ValueError(f"num_classes is {self.num_classes}, expected at least 1; without classes guidance=None")
        check(self)
        if self.start > self.end:
            raise ValueError(f"start is {self.start}, end {self.end}: expected a start no larger than the end")

    def drop(self, label: Int[Tensor, " b"], generator: torch.Generator | None = None) -> Int[Tensor, " b"]:
        """Labels of which a binomial number became 'no class': the last ones.

        A batch's order is random, so it does not matter which they are, except that every split has its r = t samples
        last: that is where the target asks for the velocity of 'no class'.
        """
        batch = len(label)
        dropped = torch.rand(batch, generator=generator, device=label.device) < self.label_dropout
        last = torch.arange(batch, device=label.device) >= batch - dropped.sum()
        return torch.where(last, self.num_classes, label)

    def velocity(
        self,
        model: Velocity,
        z: Float[Tensor, "b *s"],
        t: Float[Tensor, " b"],
        v: Float[Tensor, "b *s"],
        conditions: Conditions,
    ) -> Float[Tensor, "b *s"]:
        """v_g, without gradient and with the network in eval mode; v itself where the label is 'no class'.

        Raises:
            ValueError: if `conditions` holds no label, or not one class for each sample.

        """
        if self.omega == 1 and self.kappa == 0:
            return v
        if "label" not in conditions:
            raise ValueError("guidance is set, but the batch has no labels; pass label, or use guidance=None")
        if (label := conditions["label"]).shape != t.shape or label.is_floating_point():
            raise ValueError(
                f"label is {tuple(label.shape)} of {label.dtype}, expected a class for each of {len(t)} samples, in "
                "integers: guidance asks the network for class num_classes, 'no class'"
            )
        with torch.no_grad(), evaluating(model):
            guided = self.omega * v + self._networks_share(model, z, t, conditions).to(v.dtype)
        holds = (t >= self.start) & (t <= self.end) & (conditions["label"] != self.num_classes)
        return torch.where(over_elements(holds, v), guided, v)

    def _networks_share(self, model: Velocity, z: Tensor, t: Tensor, conditions: Conditions) -> Tensor:
        """kappa u(z, t, t | c) + (1 - omega - kappa) u(z, t, t), in one pass of the network."""
        without = dict(conditions) | {"label": torch.full_like(conditions["label"], self.num_classes)}
        if self.kappa == 0:
            return (1 - self.omega) * like(z, model(z, t, t, **without))
        both = {name: torch.cat([value, without[name]]) for name, value in conditions.items()}
        zz, tt = torch.cat([z, z]), torch.cat([t, t])
        conditional, unconditional = like(zz, model(zz, tt, tt, **both)).chunk(2)
        return self.kappa * conditional + (1 - self.omega - self.kappa) * unconditional


def guidance_of(config: LossConfig, num_classes: int) -> Guidance | None:
    """The guidance of the target; None where no label is dropped, without which there is none."""
    if config.label_dropout == 0:
        return None
    return Guidance(
        num_classes,
        omega=config.omega,
        kappa=config.kappa,
        start=config.guidance_start,
        end=config.guidance_end,
        label_dropout=config.label_dropout,
    )
