"""Error of du/dt when the statistics of GroupNorms are held constant, on a trained network.

    fullstride meanflow demo --out runs/demo
    python -m benchmarks.tuning.frozen_statistics runs/demo --out frozen-statistics.json

A norm's tangent is ty = w r (t - <t> - xh <xh t>). With its mean and deviation held constant it would be w r t: the
derivative of another network, whose norms keep, at every point, the statistics that they have at this one. In fp64, on
the held-out images of a run's data at times of its own law, and at (r, t) = (0, 1), which is what one step uses.
"""

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.harness.environment import environment
from fullstride.jvp.implementation import only_plain
from fullstride.meanflow.data.catalogue import load_data
from fullstride.meanflow.models.common import GroupNorm
from fullstride.meanflow.objective.loss import conditional_velocity, interpolate
from fullstride.meanflow.sampling.generate import load_generator
from fullstride.meanflow.training.objective import build_loss

WHAT = "the target's term (t - r) du/dt with the statistics of GroupNorms held constant, beside the exact one"
SEED = 0
Moments = tuple[Tensor, Tensor]


def grouped(norm: GroupNorm, x: Tensor) -> Tensor:
    """Reshape x to (batch, groups, elements of a group)."""
    return x.reshape(len(x), norm.groups, -1)


def moments(norm: GroupNorm, x: Tensor) -> Moments:
    """Return mean and reciprocal standard deviation of each group."""
    a = grouped(norm, x)
    mean = a.mean(-1, keepdim=True)
    return mean, torch.rsqrt((a - mean).square().mean(-1, keepdim=True) + norm.eps)


def normalised(norm: GroupNorm, held: Moments, x: Tensor) -> Tensor:
    """Normalise with these moments."""
    mean, rstd = held
    shape = (-1, *[1] * (x.dim() - 2))
    u = ((grouped(norm, x) - mean) * rstd).reshape(x.shape) * norm.weight.view(shape) + norm.bias.view(shape)
    return F.silu(u) if norm.act == "silu" else u


@contextmanager
def holding(model: nn.Module, point: tuple[Any, ...]) -> Iterator[None]:
    """Hold the statistics of every GroupNorm of the network, each called once per pass, at their present values."""
    norms = [each for each in model.modules() if isinstance(each, GroupNorm)]
    held: dict[nn.Module, Moments] = {}

    def see(norm: nn.Module, given: tuple[Any, ...]) -> None:
        assert isinstance(norm, GroupNorm)
        held[norm] = moments(norm, given[0])

    hooks = [each.register_forward_pre_hook(see) for each in norms]
    with torch.no_grad():
        model(*point)
    for hook in hooks:
        hook.remove()
    for norm in norms:
        norm.forward = partial(normalised, norm, held[norm])
    try:
        yield
    finally:
        for norm in norms:
            del norm.forward  # the class's own shows again


def derivative(model: nn.Module, z: Tensor, r: Tensor, t: Tensor, v: Tensor, label: Tensor | None = None) -> Tensor:
    """Return du/dt along (v, 0, 1), by PyTorch's own forward derivative of PyTorch operations."""
    with torch.no_grad(), only_plain(), sdpa_kernel([SDPBackend.MATH]):
        return torch.func.jvp(lambda z, t: model(z, r, t, label), (z, t), (v, torch.ones_like(t)))[1]


def compared(
    model: nn.Module, z: Tensor, r: Tensor, t: Tensor, v: Tensor, label: Tensor | None = None
) -> dict[str, float]:
    """Return error and cosine of the target's term (t - r) du/dt with held statistics, over the batch."""
    exact = derivative(model, z, r, t, v, label)
    with holding(model, (z, r, t, label)):
        other = derivative(model, z, r, t, v, label)
    a, b = (((t - r).view(-1, 1, 1, 1) * each).flatten() for each in (exact, other))
    return {"error": float((b - a).norm() / a.norm()), "cosine": float(F.cosine_similarity(a, b, dim=0))}


def main() -> None:
    """Compare on a run's network and write the JSON."""
    parser = argparse.ArgumentParser(description=WHAT)
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    generator = load_generator(asked.run, "cpu")
    model, data = generator.model.double(), load_data(generator.config.data)
    x = data.images(data.test, torch.arange(len(data.test))).double()
    label = data.test.labels if generator.num_classes else None
    draw = torch.Generator().manual_seed(SEED)
    e = torch.randn(x.shape, generator=draw, dtype=x.dtype)
    t, r = (a.double() for a in build_loss(generator.config.loss).times(len(x), generator=draw))
    v = conditional_velocity(x, e)
    points = {"the run's times": (r, t), "r = 0, t = 1": (torch.zeros_like(t), torch.ones_like(t))}
    rows = [{"times": name} | compared(model, interpolate(x, e, t), r, t, v, label) for name, (r, t) in points.items()]
    result = {
        "case": "jvp-frozen-statistics",
        "what": WHAT,
        "samples": len(x),
        "rows": rows,
        "run": asdict(generator.config) | {"output_dir": ""},  # a place on this machine says nothing
    }
    asked.out.write_text(json.dumps(result | {"environment": environment()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
