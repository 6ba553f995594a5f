"""Run in a process of its own: a failed trace would leave forward AD's level entered for every test after it."""

import copy
import sys

import torch

from fullstride.meanflow.models.dit import DiT
from fullstride.meanflow.models.recompute import recompute
from fullstride.meanflow.models.song_unet import SongUNet
from fullstride.meanflow.models.unet import UNet
from fullstride.meanflow.objective.guidance import Guidance
from fullstride.meanflow.objective.loss import MeanFlowLoss

NETWORKS = {
    "unet": lambda: UNet(
        1, 8, channels=8, channel_mult=(1, 2), num_blocks=1, attention_resolutions=(8,), num_classes=3
    ),
    "song_unet": lambda: SongUNet(
        1, 8, channels=8, channel_mult=(1, 2), num_blocks=1, attention_resolutions=(4,), dropout=0.0, num_classes=3
    ),
    "dit": lambda: DiT(1, 8, width=16, depth=2, heads=2, qk_norm=True, num_classes=3),
}


def main(network: str, backend: str, guided: str, chunk: str = "0", split: str = "static") -> None:
    """Compare loss and gradients of the loss traced as one graph with eager ones."""
    torch.manual_seed(0)
    net = NETWORKS[network]()
    for p in net.parameters():
        torch.nn.init.normal_(p, std=0.1)
    if guided == "recomputed":
        assert recompute(net) > 0
    guidance = Guidance(3, omega=1.5, kappa=0.2) if guided == "guided" else None
    tangent = "predicted" if guided in ("predicted", "averaged") else "conditional"
    average = copy.deepcopy(net).eval().requires_grad_(False) if guided == "averaged" else None
    given = {"backend": backend, "guidance": guidance, "chunk": int(chunk), "tangent": tangent, "average": average}
    loss = MeanFlowLoss(0.6, split=split, weighting="huber" if guided == "huber" else "adaptive", **given)
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


if __name__ == "__main__":
    main(*sys.argv[1:])
