"""Every newer objective by name, with the smallest network that it takes and a batch: for compiled steps and GPUs."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fullstride.meanflow.models.dit import DiT
from fullstride.meanflow.models.mit import MiT
from fullstride.meanflow.models.token_dit import TokenDiT
from fullstride.meanflow.models.x_prediction import XPrediction
from fullstride.meanflow.objective.alpha_flow import AlphaFlow
from fullstride.meanflow.objective.guidance import Guidance
from fullstride.meanflow.objective.improved_whole import WholeImprovedMeanFlow
from fullstride.meanflow.objective.loss import MeanFlowLoss
from fullstride.meanflow.objective.perceptual import PerceptualMeanFlow
from fullstride.meanflow.objective.tangent import TangentControl
from fullstride.meanflow.objective.teacher import Teacher
from fullstride.meanflow.objective.teacher_path import TeacherPath
from fullstride.meanflow.objective.terminal_velocity import TerminalVelocityMatching

BATCH, SHAPE, CLASSES = 6, (2, 8, 8), 3
Made = tuple[nn.Module, MeanFlowLoss]


def dit(**given: Any) -> DiT:
    return DiT(2, 8, width=16, depth=2, heads=2, num_classes=CLASSES, **given)


def by(loss: Callable[[nn.Module], MeanFlowLoss], network: Callable[[], nn.Module] = dit) -> Callable[[], Made]:
    def make() -> Made:
        net = network()
        for p in net.parameters():
            nn.init.normal_(p, std=0.1)
        # At a power of 1 each sample's loss is about 1, whatever its error.
        return net, dataclasses.replace(loss(net), weighting_power=0.0)

    return make


def other(net: nn.Module) -> nn.Module:
    """A frozen network of the same kind and other weights."""
    found = copy.deepcopy(net).eval().requires_grad_(False)
    for p in found.parameters():
        p.mul_(1.5)
    return found


def perceptual(net: nn.Module) -> MeanFlowLoss:
    features = nn.Conv2d(2, 4, 3, stride=2).requires_grad_(False)
    return PerceptualMeanFlow(0.5, features=features.to(next(net.parameters()).device))


GUIDED = Guidance(CLASSES, label_dropout=0.3)
NEWER: dict[str, Callable[[], Made]] = {
    "teacher": by(lambda net: MeanFlowLoss(0.5, teacher=Teacher(other(net), CLASSES, scale=1.5))),
    "warm-up": by(lambda net: MeanFlowLoss(0.5, tangent=TangentControl(0.5, 0.2))),
    "alphaflow, flow": by(lambda net: AlphaFlow(0.5, form="flow")),
    "alphaflow, discrete": by(lambda net: AlphaFlow(0.5, form="discrete", least_alpha=0.2)),
    "decoupled": by(lambda net: MeanFlowLoss(0.5), lambda: dit(decoupled_blocks=1)),
    "imf_whole": by(
        lambda net: WholeImprovedMeanFlow(0.5, guidance=GUIDED),
        lambda: MiT(2, 8, width=16, depth=2, heads=2, head_blocks=1, num_classes=CLASSES),
    ),
    "tvm": by(lambda net: TerminalVelocityMatching(0.5, average=other(net))),
    "cmt": by(lambda net: TeacherPath(0.0, teacher=Teacher(other(net)), path_steps=3)),
    "x": by(lambda net: MeanFlowLoss(0.5), lambda: XPrediction(dit())),
    "perceptual": by(perceptual, lambda: XPrediction(dit())),
    "condition": by(
        lambda net: MeanFlowLoss(0.5),
        lambda: TokenDiT(
            2, 8, patch_sizes=(4,), width=16, depth=1, heads=2, num_classes=CLASSES, condition_shape=(3, 5)
        ),
    ),
}


def drawn(name: str, loss: MeanFlowLoss, seed: int) -> dict[str, Any]:
    """Arguments of `MeanFlowLoss.at` for a batch, on the CPU."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(BATCH, *SHAPE, generator=g)
    e, t, r = loss.draw(x, g)
    label: Tensor | None = loss.drop_labels(torch.arange(BATCH) % CLASSES, g)
    conditions = loss.draw_inputs(x, t, r, g)
    conditions |= {"condition": torch.randn(BATCH, 3, 5, generator=g)} if name == "condition" else {}
    found = {"x": x, "e": e, "t": t, "r": r, "label": label, "conditions": conditions}
    return found | ({"progress": torch.full((BATCH,), 0.3)} if loss.scheduled else {})
