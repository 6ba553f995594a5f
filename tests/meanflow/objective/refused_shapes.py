"""Messages of losses and samplers about shapes that cannot be, one line each; without the tests' checks of types."""

import sys
from typing import Any

import torch

from fullstride.meanflow.objective.guidance import Guidance
from fullstride.meanflow.objective.improved import ImprovedMeanFlow
from fullstride.meanflow.objective.loss import MeanFlowLoss
from fullstride.meanflow.sampling.samplers import meanflow_sample, ode_sample


def one_channel(z, r, t, label=None):
    return z.sum(1, keepdim=True)


def with_more(z, r, t, label=None) -> Any:
    return z, t


def rows(batch, **_) -> Any:
    return torch.rand(batch, 1) + 1, torch.rand(batch, 1)


def same(z, r, t, label=None):
    return z


x, e, t = torch.randn(4, 3, 5, 5), torch.randn(4, 3, 5, 5), torch.rand(4)
label = torch.zeros(4, dtype=torch.long)
NETWORKS: tuple[Any, ...] = one_channel, with_more
TRIED = {
    f"{network.__name__} {name}": run
    for network in NETWORKS
    for name, run in {
        "ratio 0": lambda network=network: MeanFlowLoss(ratio=0.0, split="static")(network, x),
        "ratio 1": lambda network=network: MeanFlowLoss(ratio=1.0, split="static")(network, x),
        "full": lambda network=network: MeanFlowLoss(ratio=0.5, split="full")(network, x),
        "predicted": lambda network=network: ImprovedMeanFlow(ratio=1.0, split="full")(network, x),
        "differences": lambda network=network: MeanFlowLoss(ratio=1.0, backend="finite_difference")(network, x),
        "dual": lambda network=network: MeanFlowLoss(ratio=1.0, backend="forward_ad")(network, x),
        "guidance": lambda network=network: Guidance(3, 2.0).velocity(network, x, t, x, {"label": label}),
        "meanflow": lambda network=network: meanflow_sample(network, x),
        "rk4": lambda network=network: ode_sample(network, x, method="rk4", steps=1),
    }.items()
} | {
    "empty": lambda: MeanFlowLoss()(same, torch.zeros(0, 3, 4, 4)),
    "elementless": lambda: MeanFlowLoss()(same, torch.zeros(4, 0)),
    "a number": lambda: MeanFlowLoss()(same, torch.tensor(1.0)),
    "bytes": lambda: MeanFlowLoss()(same, torch.zeros(4, 3, dtype=torch.uint8)),
    "complex": lambda: MeanFlowLoss()(same, torch.zeros(4, 3, dtype=torch.complex64)),
    "labels": lambda: MeanFlowLoss()(same, x, label[:3]),
    "one label": lambda: MeanFlowLoss()(same, x, label[:1]),
    "guided rows": lambda: Guidance(3, 2.0).velocity(same, x, t, x, {"label": label[:, None]}),
    "guided floats": lambda: Guidance(3, 2.0).velocity(same, x, t, x, {"label": t}),
    "noise": lambda: MeanFlowLoss().at(same, x, e[:, :1], t, t),
    "one time": lambda: MeanFlowLoss().at(same, x, e, t[:1], t[:1]),
    "rows of times": lambda: MeanFlowLoss().at(same, x, e, t[:, None], t[:, None]),
    "other r": lambda: MeanFlowLoss().at(same, x, e, t, t[:1]),
    "law": lambda: MeanFlowLoss(times=rows)(same, torch.randn(4, 4)),
}

for name, run in TRIED.items():
    try:
        run()
        sys.stdout.write(f"{name}: let pass\n")
    except ValueError as error:
        sys.stdout.write(f"{name}: {error}\n")
