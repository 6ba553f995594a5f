"""`loss=imf` and `loss=imf_ema`: du/dt along a predicted velocity (arXiv:2512.02012, its form without a head for v)."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fullstride.meanflow.config.schema import LossConfig
from fullstride.meanflow.models.common import evaluating
from fullstride.meanflow.objective.derivative import Conditions, Velocity
from fullstride.meanflow.objective.loss import CONFLICTS, MeanFlowLoss
from fullstride.meanflow.objective.shapes import like
from fullstride.settings.fields import Conflict
from fullstride.step.torch import Averages


@dataclass(frozen=True)
class ImprovedMeanFlow(MeanFlowLoss):
    """MeanFlow in which z moves along the network's own u(z, t, t), without gradient and in eval mode.

    Then u + (t - r) du/dt is a function of z alone, which is regressed on the velocity.

    Attributes:
        average: the network that predicts that velocity in the trained one's place, such as a moving average of it,
            whose errors the trained one's do not feed; None is the trained one.

    """

    more_passes: ClassVar[int] = 1
    conflicts: ClassVar[tuple[Conflict, ...]] = (
        *CONFLICTS,
        Conflict(
            "loss loss.tangent",
            lambda c: c.loss.tangent == "teacher",
            "loss=meanflow with a teacher, along whose velocity z moves; or loss.tangent=data",
        ),
    )

    average: Velocity | None = None

    def _moving(self, model: Velocity, z: Tensor, t: Tensor, v: Tensor, conditions: Conditions) -> Tensor:
        network = model if self.average is None else self.average
        with torch.no_grad(), evaluating(network):
            return like(z, network(z, t, t, **conditions)).to(v.dtype)


@dataclass(frozen=True)
class AverageMeanFlow(ImprovedMeanFlow):
    """`ImprovedMeanFlow` along the velocity of the network's first moving average."""

    conflicts: ClassVar[tuple[Conflict, ...]] = (
        *ImprovedMeanFlow.conflicts,
        Conflict(
            "loss distributed",
            lambda c: c.distributed == "fsdp",
            "an average that each process holds in full, as with distributed=ddp; or loss=imf",
        ),
    )

    @classmethod
    def build(
        cls, config: LossConfig, num_classes: int = 0, averages: Averages | None = None, **own: Any
    ) -> "MeanFlowLoss":
        """Build as `MeanFlowLoss.build`.

        Raises:
            ValueError: without averages.

        """
        if averages is None:
            raise ValueError(
                f"loss={config.name} without averages, expected those of the network, since z moves along the velocity "
                "of the first"
            )
        return super().build(config, num_classes, averages, average=averages.model, **own)
