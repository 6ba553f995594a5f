"""The objectives, their weightings and their laws of the times by name: where each is imported from."""

from collections.abc import Mapping
from dataclasses import dataclass, field

SPLITS = ("auto", "static", "shared", "full", "bernoulli")

_HERE = "fullstride.meanflow.objective"


@dataclass(frozen=True)
class ObjectiveRow:
    """An objective.

    Attributes:
        loss: import path of its class.
        settings: settings that begin at other values than `LossConfig`'s.
        velocity: whether the trained u(z, t, t) is the flow's velocity, as a teacher's must be.
        taught: whether it needs a teacher.

    """

    loss: str
    settings: Mapping[str, float] = field(default_factory=dict)
    velocity: bool = True
    taught: bool = False


OBJECTIVES: dict[str, ObjectiveRow] = {
    "meanflow": ObjectiveRow(f"{_HERE}.loss:MeanFlowLoss"),
    "imf": ObjectiveRow(f"{_HERE}.improved:ImprovedMeanFlow"),
    "imf_ema": ObjectiveRow(f"{_HERE}.improved:AverageMeanFlow"),
    "imf_whole": ObjectiveRow(f"{_HERE}.improved_whole:WholeImprovedMeanFlow"),
    "perceptual": ObjectiveRow(f"{_HERE}.perceptual:PerceptualMeanFlow"),
    "alphaflow": ObjectiveRow(f"{_HERE}.alpha_flow:AlphaFlow"),
    "tvm": ObjectiveRow(
        f"{_HERE}.terminal_velocity:TerminalVelocityMatching", {"meanflow_ratio": 0.5, "weighting_power": 0.0}
    ),
    "cmt": ObjectiveRow(
        f"{_HERE}.teacher_path:TeacherPath",
        {"meanflow_ratio": 0.0, "weighting_power": 0.0},
        velocity=False,
        taught=True,
    ),
    "mse": ObjectiveRow(f"{_HERE}.flow_matching:FlowMatching", {"meanflow_ratio": 0.0, "weighting_power": 0.0}),
}
WEIGHTINGS: dict[str, str] = {
    "adaptive": f"{_HERE}.weighting:ADAPTIVE",
    "huber": f"{_HERE}.huber:HUBER",
}
TIME_LAWS: dict[str, str] = {
    "v0": f"{_HERE}.times:LogitNormalV0",
    "v1": f"{_HERE}.times:LogitNormalV1",
    "uniform": f"{_HERE}.times:Uniform",
}
