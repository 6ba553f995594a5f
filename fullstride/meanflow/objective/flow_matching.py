"""`loss=mse`: E||u_theta(z_t, t, t) - v||^2, plain flow matching: every r = t and every weight 1 (arXiv:2210.02747)."""

from dataclasses import dataclass
from typing import Any, ClassVar

from fullstride.meanflow.config.schema import LossConfig
from fullstride.meanflow.objective.loss import MeanFlowLoss
from fullstride.meanflow.objective.times import times_of
from fullstride.settings.fields import Conflict, NotNegative, Share
from fullstride.step.torch import Averages


@dataclass(frozen=True)
class FlowMatching(MeanFlowLoss):
    """Flow matching."""

    ratio: Share = 0.0
    weighting_power: NotNegative = 0.0

    # It has none of them: a value given here would be ignored.
    conflicts: ClassVar[tuple[Conflict, ...]] = (
        *(
            Conflict(
                f"loss.{key}",
                lambda c, key=key: getattr(c.loss, key) != 0,
                "0 for loss=mse; leave it out or use loss=meanflow",
            )
            for key in ("meanflow_ratio", "weighting_power")
        ),
        Conflict(
            "loss loss.omega loss.kappa loss.label_dropout",
            lambda c: c.loss.guided or c.loss.label_dropout > 0,
            "no guidance, which is part of MeanFlow's target; use loss=meanflow, with loss.meanflow_ratio=0 for r = t",
        ),
        Conflict(
            "loss loss.tangent loss.tangent_warmup loss.tangent_limit",
            lambda c: c.loss.tangent != "data" or c.loss.tangent_warmup > 0 or c.loss.tangent_limit > 0,
            "none of them, as nothing is differentiated; leave them out or use loss=meanflow",
        ),
        *MeanFlowLoss.conflicts,
    )

    @classmethod
    def build(
        cls, config: LossConfig, num_classes: int = 0, averages: Averages | None = None, **own: Any
    ) -> "MeanFlowLoss":
        """Build as `MeanFlowLoss.build`; only the times are read."""
        return cls(times=times_of(config), **own)
