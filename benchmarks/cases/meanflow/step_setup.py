"""Settings that all rows of the step benchmark share: the network, the machine's rates, the options."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.cases.meanflow.options import BACKENDS, StepOptions
from benchmarks.harness.budget import Budget
from fullstride.device.precision import set_precision
from fullstride.device.select import resolve_device
from fullstride.meanflow.config.presets import MODELS
from fullstride.meanflow.objective.loss import MeanFlowLoss
from fullstride.meanflow.objective.times import LogitNormalV0
from fullstride.meanflow.training.build import build_model, in_channels_last
from fullstride.meanflow.training.step import randomize_zero_layers
from fullstride.measure.flops import count_flops
from fullstride.measure.roofline import Ceilings, RooflineBound, measure_ceilings, roofline_bound
from fullstride.measure.timing import Clock, TimingPlan, clock_for
from fullstride.step.torch.runners.backends import check_backend

# CIFAR-10's images for the networks of their size, digits' for the tiny ones, latents of 256x256 pictures for DiT.
IMAGE_SHAPES = {name: make().image_shape for name, make in MODELS.items()}
IMAGE_SHAPES |= {name: (1, 8, 8) for name in MODELS if name.endswith("tiny")}
# Calls of more than SLOW_MS tell what they take in fewer: their spread is small.
PLAN, SLOW, SLOW_MS = (
    TimingPlan(warmup=2, repeats=20, seconds=0.5, most=60),
    TimingPlan(warmup=1, repeats=8, seconds=0.0),
    250.0,
)
PROGRESS = 0.35
Drawn = dict[str, Any]  # x, e, t and r of a batch


@dataclass(frozen=True)
class StepSetup:
    """Network with the settings and rates with which it is measured."""

    options: StepOptions
    device: torch.device
    model: nn.Module
    shape: tuple[int, ...]
    generator: torch.Generator
    clock: Clock
    ceilings: Ceilings
    forward_flops: int  # of one image
    budget: Budget

    @property
    def precision(self) -> str:
        """Precision of matrix products."""
        return self.options.precision

    @property
    def backends(self) -> tuple[str, ...]:
        """Backends of the steps."""
        return self.options.backends or (BACKENDS if self.device.type == "cuda" else ("eager",))

    @property
    def weight_bytes(self) -> int:
        """Bytes of the network's weights."""
        return sum(p.numel() * p.element_size() for p in self.model.parameters())

    def loss(self, ratio: float, **settings: Any) -> MeanFlowLoss:
        """Return CIFAR-10's loss at that ratio; ratio 0 is flow matching with adaptive weights."""
        usual = {"times": LogitNormalV0(-2.0, 2.0), "weighting_power": 0.75, "weighting_eps": 1e-3}
        return MeanFlowLoss(ratio, **usual | settings)

    def images(self, batch: int) -> Tensor:
        """Return random images; the arithmetic does not depend on their content."""
        return self.ordered(torch.randn(batch, *self.shape, device=self.device, generator=self.generator))

    def ordered(self, x: Tensor) -> Tensor:
        """Return images in the chosen memory format."""
        return x.contiguous(memory_format=torch.channels_last) if self.options.channels_last else x

    def drawn(self, loss: MeanFlowLoss, x: Tensor) -> Drawn:
        """Draw noise and times for data."""
        e, t, r = loss.draw(x, self.generator)
        return {"x": x, "e": e, "t": t, "r": r} | progress_of(loss, x)

    def floor(self, forwards: float, passes: float, batch: int) -> RooflineBound:
        """Return the roofline bound of `forwards` forward passes of a batch and `passes` transfers of the weights."""
        return roofline_bound(forwards * batch * self.forward_flops, passes * self.weight_bytes, self.ceilings)

    def plan(self, ms: float) -> TimingPlan:
        """Return how often to call a function that takes this long."""
        return SLOW if ms > SLOW_MS else PLAN


def progress_of(loss: MeanFlowLoss, x: Tensor) -> Drawn:
    """Return the share of a run at which a scheduled loss is measured; none for another."""
    return {"progress": x.new_full(x.shape[:1], PROGRESS)} if loss.scheduled else {}


def weight_passes(averages: int, parts: int = 1) -> float:
    """Return how often the weights' bytes move in a whole step, if several processes share its last part.

    The forward and the backward pass read them, gradients are written; then AdamW reads 4 as large and writes 3,
    gradients become zero, and each average is read and written.
    """
    return 3 + (8 + 2 * averages) / parts


def make_setup(options: StepOptions, known: tuple[Ceilings, int] | None = None) -> StepSetup:
    """Build the preset's network in training mode with nonzero random weights, and measure the machine's rates.

    `known` are rates and the operations of a forward pass of one image, if already measured. ConfigError if the
    device is not there or cannot take the precision or a backend.
    """
    device, shape = resolve_device(options.device), IMAGE_SHAPES[options.model]
    set_precision(options.precision, device)
    torch.manual_seed(0)
    budget = Budget.of(options.seconds)
    config = MODELS[options.model]()
    if "dropout" in vars(config) and not options.dropout:
        config = replace(config, dropout=0.0)
    # Layers that start as good as zero would hide a wrong derivative behind them.
    model = randomize_zero_layers(build_model(config, shape, num_classes=0), torch.Generator().manual_seed(0)).to(
        device
    )
    if options.channels_last:
        in_channels_last(model)
    for name in options.backends:
        check_backend(name, device, torch.optim.AdamW(model.parameters()))
    kind = device.type

    @torch.no_grad()
    def one_image() -> Tensor:
        return model(torch.zeros(1, *shape, device=device), *torch.tensor([[0.0], [1.0]], device=device))

    ceilings, flops = known or (
        measure_ceilings(kind, "bfloat16" if options.precision == "bf16" else "float32"),
        count_flops(one_image),
    )
    generator = torch.Generator(device).manual_seed(0)
    return StepSetup(options, device, model, shape, generator, clock_for(kind), ceilings, flops, budget)
