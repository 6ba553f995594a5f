"""Run in a process of its own: a failed trace would leave forward AD's level entered for every test after it."""

import copy
import functools
import sys

import torch
from torch import nn

from fullstride.meanflow.models.common import recompute
from fullstride.meanflow.models.dit import DiT
from fullstride.meanflow.models.song_unet import SongUNet
from fullstride.meanflow.models.unet import UNet
from fullstride.meanflow.objective.guidance import Guidance
from fullstride.meanflow.objective.improved import ImprovedMeanFlow
from fullstride.meanflow.objective.loss import MeanFlowLoss

NETWORKS = {
    "unet": lambda: UNet(1, 8, channels=8, channel_mult=(1,), num_blocks=1, attention_resolutions=(8,), num_classes=3),
    "song_unet": lambda: SongUNet(
        1, 8, channels=8, channel_mult=(1,), num_blocks=1, attention_resolutions=(8,), dropout=0.0, num_classes=3
    ),
    "dit": lambda: DiT(1, 8, width=16, depth=1, heads=2, qk_norm=True, num_classes=3),
}
# Backend of the derivative, split, options: every one of them with the smallest network, and the others with one.
CASES = {
    "unet": [("func", "shared", "predicted"), ("two_pass", "static")],
    "song_unet": [("func", "static", "huber")],
    "dit": [("forward_ad", "static", "huber", "guided", "chunked")],
    "dit, recomputed": [("func", "shared", "averaged", "recomputed")],
}


def check(net: nn.Module, backend: str, split: str, *options: str) -> None:
    """Compare loss and gradients of the loss traced as one graph with eager ones."""
    if "recomputed" in options:
        assert recompute(net) > 0
    average = copy.deepcopy(net).eval().requires_grad_(False) if "averaged" in options else None
    predicted = {"predicted", "averaged"} & {*options}
    make = functools.partial(ImprovedMeanFlow, average=average) if predicted else MeanFlowLoss
    loss = make(
        0.6,
        split=split,
        backend=backend,
        weighting="huber" if "huber" in options else "adaptive",
        guidance=Guidance(3, omega=1.5, kappa=0.2) if "guided" in options else None,
        chunk=3 if "chunked" in options else 0,
    )
    x, label = torch.randn(5, 1, 8, 8), torch.arange(5) % 3
    e, t, r = loss.draw(x)
    traced = torch.compile(lambda: loss.at(net, x, e, t, r, label)[0], fullgraph=True, backend="aot_eager")
    values = []
    for _ in range(2 if average is not None else 1):
        expected, _ = loss.at(net, x, e, t, r, label)
        gradients = torch.autograd.grad(expected, list(net.parameters()))
        got = traced()
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=0)
        for a, b in zip(torch.autograd.grad(got, list(net.parameters())), gradients, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
        assert expected > 0
        values.append(sum(g.abs().sum().item() for g in gradients))
        for p in [] if average is None else average.parameters():
            p.mul_(1.5)  # as it moves in a run
    assert len(set(values)) == len(values)


def main(name: str) -> None:
    """Check all cases of a network."""
    for number, case in enumerate(CASES[name]):
        sys.stdout.write(f"{name} {case}\n")
        torch.manual_seed(number)
        net = NETWORKS[name.partition(",")[0]]()
        for p in net.parameters():
            nn.init.normal_(p, std=0.1)
        check(net, *case)


if __name__ == "__main__":
    main(*sys.argv[1:])
