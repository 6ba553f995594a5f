"""`python -m benchmarks jvp-networks`: training passes of whole networks, with a forward derivative and without.

A forward and a backward pass of networks as other libraries build them, eager and compiled; the same with the
derivative along a random tangent of the images; and whole steps of `TrainStep`. fullstride's own U-Net, which has its
norms fused without a derivative, too, stands beside itself with torch's norms.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn

from benchmarks.cases.jvp.common import LeftOut, broken
from benchmarks.cases.jvp.options import NetworksOptions
from benchmarks.harness.budget import NO_TIME, Budget, one_stream, say
from benchmarks.harness.environment import environment
from benchmarks.harness.results import CaseResult, Row, at
from benchmarks.harness.table import BOUND, finish, median, rows_table, spread
from fullstride.device.precision import set_precision
from fullstride.device.select import resolve_device
from fullstride.jvp import jvp, prepare
from fullstride.meanflow.models.common import GroupNorm
from fullstride.meanflow.models.unet import UNet
from fullstride.measure.flops import count_flops
from fullstride.measure.gate import require_close
from fullstride.measure.roofline import Ceilings, measure_ceilings, roofline_bound
from fullstride.measure.timing import TimingPlan, clock_for, measure
from fullstride.step.torch import TrainStep

# Of a pass in which every layer rounds, beside fp32.
TOLERANCE = {"bf16": 0.1, "fp32": 1e-4}
STEP = 1e-4  # of the difference
WAYS = ("eager", "compiled", "TrainStep")
Sizes = dict[str, Any]


def timm_vit(sizes: Sizes) -> nn.Module:
    """Build timm's ViT-B/16, or a smaller one."""
    import timm  # pyright: ignore[reportMissingImports]

    return timm.create_model("vit_base_patch16_224", **sizes)


class Denoiser(nn.Module):
    """A network of images and times, of images alone."""

    def __init__(self, network: nn.Module, call: Callable[[nn.Module, Tensor, Tensor], Tensor]):
        """Make it; `call` takes the network, the images and one time each."""
        super().__init__()
        self.network, self.call = network, call

    def forward(self, x: Tensor) -> Tensor:
        """Call the network at the time 0.5."""
        return self.call(self.network, x, torch.full((len(x),), 0.5, dtype=x.dtype, device=x.device))


def diffusers_unet(sizes: Sizes) -> nn.Module:
    """Build the U-Net of diffusers with attention at half the resolution."""
    from diffusers import UNet2DModel  # pyright: ignore[reportMissingImports]

    down = ("DownBlock2D", "AttnDownBlock2D", "DownBlock2D")
    up = ("UpBlock2D", "AttnUpBlock2D", "UpBlock2D")
    network = UNet2DModel(sample_size=32, down_block_types=down, up_block_types=up, **sizes)
    return Denoiser(network, lambda network, x, t: network(x, t).sample)


def own_unet(sizes: Sizes) -> nn.Module:
    """Build fullstride's U-Net."""
    return Denoiser(UNet(3, 32, **sizes), lambda network, x, t: network(x, t - 0.1, t))


def own_unet_by_torch(sizes: Sizes) -> nn.Module:
    """Build fullstride's U-Net with torch's norms and activations in the place of its own."""
    model = own_unet(sizes)
    for parent in list(model.modules()):
        for name, norm in parent.named_children():
            if isinstance(norm, GroupNorm):
                theirs = nn.GroupNorm(norm.groups, len(norm.weight), norm.eps)
                parent.add_module(name, nn.Sequential(theirs, nn.SiLU()) if norm.act else theirs)
    return model


@dataclass(frozen=True)
class Network:
    """How a network is built, its image, and the sizes of a small one for a processor."""

    make: Callable[[Sizes], nn.Module]
    image: tuple[int, int, int]
    small: Sizes
    large: Sizes = field(default_factory=dict)


OWN = {"channels": 16, "channel_mult": [1, 2], "num_blocks": 1, "attention_resolutions": [16]}
NETWORKS = {
    "timm-vit": Network(timm_vit, (3, 224, 224), {"embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 4}),
    "diffusers-unet": Network(
        diffusers_unet,
        (3, 32, 32),
        {"block_out_channels": (8, 8, 8), "layers_per_block": 1, "norm_num_groups": 4},
        {"block_out_channels": (128, 256, 256)},
    ),
    "unet": Network(own_unet, (3, 32, 32), OWN),
    "unet-torch-norms": Network(own_unet_by_torch, (3, 32, 32), OWN),
}
Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]  # of the model, images and their tangent


def _still(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    return model(x).float().square().mean()


def _moving(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    u, du = jvp(model, (x,), (t,))
    return (u - du).float().square().mean()


LOSSES: dict[str, Loss] = {"plain": _still, "jvp": _moving}


@dataclass(frozen=True)
class Problem:
    """A network, a batch of images and their tangent."""

    model: nn.Module
    x: Tensor
    t: Tensor
    precision: str

    @classmethod
    def draw(cls, network: Network, options: NetworksOptions, device: torch.device) -> "Problem":
        """Draw weights and images."""
        torch.manual_seed(0)
        small = options.small or device.type == "cpu"
        model = network.make(network.small if small else network.large).to(device)
        with torch.no_grad():  # also of the layers that start at zero and hide what is before them
            for p in model.parameters():
                p.add_(0.02 * torch.randn_like(p))
        x, t = torch.randn(2, options.batch_size, *network.image, device=device).unbind()
        return cls(model, x, t, options.precision)

    def loss(self, who: str) -> Callable[[], Tensor]:
        """Return the loss in its precision."""

        def loss() -> Tensor:
            with torch.autocast(self.x.device.type, torch.bfloat16, enabled=self.precision == "bf16"):
                return LOSSES[who](self.model, self.x, self.t)

        return loss

    def step(self, who: str, way: str) -> Callable[[], Any]:
        """Return a forward and a backward pass, or a whole step with an optimizer."""
        if way == "TrainStep":
            backend = "compile+graph" if self.x.is_cuda else "eager"
            model, loss = copy.deepcopy(self.model), LOSSES[who]
            optimizer = torch.optim.AdamW(model.parameters(), 1e-5, fused=True)
            whole = lambda model, batch: loss(model, *batch)  # noqa: E731
            step = TrainStep(whole, model, optimizer, backend=backend, precision=self.precision)
            return lambda: step((self.x, self.t))
        loss = torch.compile(self.loss(who)) if way == "compiled" else self.loss(who)

        def both() -> None:
            self.model.zero_grad()
            loss().backward()

        return both

    @cached_property
    def flops(self) -> int:
        """Operations of a forward and a backward pass without a derivative."""
        return count_flops(lambda: _still(self.model, self.x, self.t).backward())

    def error(self) -> float:
        """Compare gradients of the loss with those in fp64, where the derivative is a difference of values."""
        few = replace(self, x=self.x[:2], t=self.t[:2])
        exact = replace(few, model=copy.deepcopy(self.model).double(), x=few.x.double(), t=few.t.double())
        with torch.no_grad():
            ahead, behind = (exact.model(exact.x + h * exact.t) for h in (STEP, -STEP))
        right = (exact.model(exact.x) - (ahead - behind) / (2 * STEP)).square().mean()
        found, expected = _gradients(few.model, few.loss("jvp")()), _gradients(exact.model, right)
        return require_close("gradients", found, expected, TOLERANCE[self.precision])


def _gradients(model: nn.Module, loss: Tensor) -> Tensor:
    found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, materialize_grads=True)
    return torch.cat([g.flatten() for g in found])


def run(options: NetworksOptions, out: Path) -> Path:
    """Check, measure, print the table and write the JSON; return its path.

    GateError if a gradient is wrong, or a pass of ours cannot be measured.
    """
    device = resolve_device(options.device)
    set_precision("fp32", device)
    ceilings = measure_ceilings(device.type, {"bf16": "bfloat16"}.get(options.precision, "float32"))
    entries, gate, budget = list[Row | LeftOut](), {}, Budget.of(options.seconds)
    for name in options.only or NETWORKS:
        with one_stream(device):
            problem = Problem.draw(NETWORKS[name], options, device)
            gate[name] = problem.error()
            entries += _rows(name, problem, budget, ceilings)
    rows = [entry for entry in entries if isinstance(entry, Row)]
    left_out = [vars(entry) for entry in entries if isinstance(entry, LeftOut)]
    conditions: dict[str, Any] = {"precision": options.precision, "batch_size": options.batch_size}
    conditions |= at(only=(options.only, ()), small=(options.small, False)) | {"left_out": left_out}
    result = CaseResult("jvp-networks", device.type, conditions, gate, ceilings, rows, environment())
    wrong = [
        f"{e['shape']}, {e['who']}, {e['kind']}: {e['why']}"
        for e in left_out
        if e["who"] == "jvp" and e["why"] != NO_TIME
    ]
    return finish(result, out, lambda: [table(rows)], width=0, wrong=wrong)


def _rows(name: str, problem: Problem, budget: Budget, ceilings: Ceilings) -> Iterator[Row | LeftOut]:
    clock = clock_for(problem.x.device.type)
    for who in LOSSES:
        if who == "jvp":
            prepare(problem.model)
        for way in WAYS:
            if budget.spent:
                yield LeftOut(name, way, who, NO_TIME)
                continue
            say(f"timing: {name}, {who}, {way}")
            torch._dynamo.reset()
            try:
                timing = measure(problem.step(who, way), clock, TimingPlan(warmup=3, repeats=20, seconds=1.0))
            except Exception as error:
                yield broken(name, way, who, error)
                continue
            # The derivative adds a forward pass to one forward and two backward ones.
            bound = roofline_bound(problem.flops * (4 / 3 if who == "jvp" else 1), 0, ceilings)
            yield Row(f"{name}, {who}, {way}", timing, bound, {"network": name, "who": who, "way": way})


def table(rows: list[Row]) -> Table:
    """Return a table of milliseconds, and of multiples of the pass without a derivative."""
    plain = {(r.extra["network"], r.extra["way"]): r.timing.median_ms for r in rows if r.extra["who"] == "plain"}

    def ratio(row: Row) -> str:
        beside = plain.get((row.extra["network"], row.extra["way"]))
        return "" if beside is None else f"{row.timing.median_ms / beside:.2f}"

    columns = (("ms", lambda row: row.name), ("median", median), ("p10-p90", spread), ("x plain", ratio), *BOUND)
    return rows_table("forward and backward pass", columns, rows)
