"""`fullstride bench meanflow-step`: what the JVP adds to a training step, beside the arithmetic's floor.

Six rows: a forward pass, a flow-matching step, MeanFlow steps with 0, 25 and 100 % of the samples in the JVP, and the
target alone. Steps are forward and backward, without optimizer. With F the operations of a forward pass, a step takes
3F, the tangent one F more for its share of the samples: MeanFlow over flow matching is bound by 1 + ratio/3.
"""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from fullstride.bench.environment import environment
from fullstride.bench.floor import Ceilings, count_flops, floor, measure_ceilings
from fullstride.bench.gate import require_close
from fullstride.bench.results import CaseResult, Row, write_result
from fullstride.bench.table import result_table
from fullstride.bench.timing import Clock, Plan, clock_for, measure
from fullstride.device import resolve_device
from fullstride.meanflow.build import build_model
from fullstride.meanflow.derivative import velocity_and_derivative
from fullstride.meanflow.objective import MeanFlowLoss, conditional_velocity, interpolate
from fullstride.meanflow.presets import MODELS
from fullstride.meanflow.times import LogitNormalV0
from fullstride.precision import autocast, set_precision

# CIFAR-10's images for the network of its size, digits' for the tiny one.
# What each network is made for; DiT's are the latents of 256x256 pictures.
IMAGE_SHAPES = {name: (4, 32, 32) if name.startswith("dit") else (3, 32, 32) for name in MODELS}
IMAGE_SHAPES |= {name: (1, 8, 8) for name in MODELS if name.endswith("tiny")}
RATIOS = (0.0, 0.25, 1.0)
GATE_CHUNK = 8
# The relative error against fp64 that a right step stays below: rounding grows through some 60 layers.
TOLERANCE = {"fp32": 2e-3, "tf32": 2e-2, "bf16": 1e-1}


@dataclass(frozen=True)
class Setup:
    """The network, and how it is run."""

    model: nn.Module
    shape: tuple[int, int, int]
    device: torch.device
    precision: str
    compiled: bool

    def loss(self, ratio: float) -> MeanFlowLoss:
        """CIFAR-10's loss at that ratio; at 0 plain flow matching with adaptive weights."""
        return MeanFlowLoss(ratio, LogitNormalV0(-2.0, 2.0), weighting_power=0.75, weighting_eps=1e-3)

    def maybe_compiled(self, call: Callable) -> Callable:
        """The call as the backend runs it."""
        return torch.compile(call, fullgraph=True, dynamic=False) if self.compiled else call

    def autocast(self) -> AbstractContextManager:
        """bf16 where asked for."""
        return autocast(self.precision, self.device)

    def images(self, batch: int) -> Tensor:
        """Random data; the arithmetic does not depend on what it shows."""
        return torch.randn(batch, *self.shape, device=self.device)

    def step(self, function: Callable[..., Tensor], draw: Callable, x: Tensor) -> Callable[[], Tensor]:
        """Forward and backward of a loss on fresh noise and times; `function` and `draw` as in MeanFlowLoss."""

        def call() -> Tensor:
            self.model.zero_grad(set_to_none=True)
            with self.autocast():
                loss = function(x, *draw(x))
            loss.backward()
            return loss

        return call


def _mse(setup: Setup) -> Callable[..., Tensor]:
    def loss(x: Tensor, e: Tensor, t: Tensor, r: Tensor) -> Tensor:
        z, v = interpolate(x, e, t), conditional_velocity(x, e)
        return (setup.model(z, t, t).float() - v).square().mean()

    return setup.maybe_compiled(loss)


def _meanflow(setup: Setup, ratio: float) -> Callable[..., Tensor]:
    loss = setup.loss(ratio)
    return setup.maybe_compiled(lambda *args: loss.at(setup.model, *args)[0])


def _forward(setup: Setup, x: Tensor) -> Callable[[], Tensor]:
    t = torch.rand(len(x), device=x.device)
    forward = setup.maybe_compiled(lambda z, r, t: setup.model(z, r, t))

    def call() -> Tensor:
        with torch.no_grad(), setup.autocast():
            return forward(x, t / 2, t)

    return call


def _target(setup: Setup, x: Tensor) -> Callable[[], Tensor]:
    """The JVP as training runs it, with the prediction's graph; no backward."""
    loss = setup.loss(1.0)
    derivative = setup.maybe_compiled(lambda *args: velocity_and_derivative(setup.model, *args))

    def call() -> Tensor:
        e, t, r = loss.draw(x)
        with setup.autocast():
            return derivative(interpolate(x, e, t), r, t, conditional_velocity(x, e))[1]

    return call


@dataclass(frozen=True)
class Gated:
    """A step that passed: its errors against fp64, and how long its first call took, compilation included."""

    errors: dict[str, float]
    first_ms: float


def gate(setup: Setup, function: Callable[..., Tensor], x: Tensor, clock: Clock) -> Gated:
    """Loss and gradients of the full-ratio step against fp64, eager, on the very function and batch to be timed.

    Raises:
        GateError: if they disagree; then nothing is timed.

    """
    drawn = setup.loss(1.0).draw(x)
    results: list[Tensor] = []
    first = clock.time(lambda: results.append(setup.step(function, lambda _: drawn, x)()))
    exact, reference = _fp64_loss(setup, x, *drawn)
    tolerance = TOLERANCE[setup.precision]
    errors = {
        "loss": require_close("loss", results[0], exact, tolerance),
        "gradients": require_close("gradients", _gradients(setup.model), _gradients(reference), tolerance),
    }
    return Gated(errors, first)


def _fp64_loss(setup: Setup, *batch: Tensor) -> tuple[Tensor, nn.Module]:
    """The loss in fp64 and the network holding its gradients, a few samples at a time to bound the memory."""
    reference = copy.deepcopy(setup.model).double()
    reference.zero_grad(set_to_none=True)
    total = torch.zeros((), dtype=torch.float64, device=setup.device)
    for part in zip(*(a.double().split(GATE_CHUNK) for a in batch), strict=True):
        loss = setup.loss(1.0).at(reference, *part)[0] * (len(part[0]) / len(batch[0]))
        loss.backward()
        total += loss.detach()
    return total, reference


def _gradients(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten().float() for p in model.parameters() if p.grad is not None])


def _rows(setup: Setup, x: Tensor, plan: Plan) -> tuple[list[Row], Ceilings, dict[str, float]]:
    """Gate, then time; the rows, the ceilings of the same run, and the gate's errors."""
    clock = clock_for(setup.device.type)
    functions = {ratio: _meanflow(setup, ratio) for ratio in RATIOS}
    say = Console(stderr=True).print
    say("gate: the full step against fp64")
    passed = gate(setup, functions[1.0], x, clock)
    say(f"passed: {passed.errors}; measuring the ceilings")
    ceilings = measure_ceilings(setup.device.type, "bfloat16" if setup.precision == "bf16" else "float32")
    forward_flops = count_flops(lambda: _eager_forward(setup, x[:1])) * len(x)
    weights = sum(p.numel() for p in setup.model.parameters()) * 4

    def row(name: str, call: Callable, forwards: int | float, passes: int, **extra: Any) -> Row:
        say(f"timing: {name}")
        timing = measure(call, clock, plan)
        return Row(name, timing, floor(forwards * forward_flops, passes * weights, ceilings), extra)

    # A step reads the weights forward and backward and writes their gradients.
    rows = [
        row("forward, no grad", _forward(setup, x), 1, 1),
        row("FM MSE step", setup.step(_mse(setup), setup.loss(0.0).draw, x), 3, 3),
    ]
    for ratio, function in functions.items():
        step = setup.step(function, setup.loss(ratio).draw, x)
        rows.append(row(f"MeanFlow {ratio:.0%} step", step, 3 + ratio, 3, ratio=ratio))
    rows[-1] = replace(rows[-1], timing=replace(rows[-1].timing, first_ms=passed.first_ms))
    rows.append(row("JVP target alone", _target(setup, x), 2, 1))
    for r in rows:
        r.extra["over_flow_matching"] = r.timing.median_ms / rows[1].timing.median_ms
    return rows, ceilings, passed.errors


def _eager_forward(setup: Setup, x: Tensor) -> None:
    with torch.no_grad(), setup.autocast():
        setup.model(x, x.new_zeros(len(x)), x.new_ones(len(x)))


def make_setup(device: str, precision: str, backend: str, model: str) -> Setup:
    """The network of that preset with random weights, none of them zero, in training mode."""
    chosen, shape = resolve_device(device), IMAGE_SHAPES[model]
    set_precision(precision, chosen)
    torch.manual_seed(0)
    config = MODELS[model]()
    if hasattr(config, "dropout"):
        config.dropout = 0.0  # the gate compares with fp64, whose masks would be others
    network = build_model(config, shape, num_classes=0)
    for p in network.parameters():
        # Layers that start at zero would hide a wrong derivative behind them.
        if p.ndim > 1 and not p.detach().any():
            nn.init.normal_(p, std=0.02)
    return Setup(network.to(chosen), shape, chosen, precision, backend == "compile")


def run(*, device: str, batch_size: int, precision: str, backend: str, model: str, out: Path) -> Path:
    """Gate, measure, print the table and write the JSON, whose path is returned.

    Raises:
        ConfigError: if the device is not there or cannot take the precision.
        GateError: if the step is wrong.

    """
    setup = make_setup(device, precision, backend, model)
    kind = setup.device.type
    rows, ceilings, errors = _rows(setup, setup.images(batch_size), Plan(seconds=2.0, repeats=10, most=100))
    conditions = {
        "model": model,
        "precision": precision,
        "backend": backend,
        "batch_size": batch_size,
        "image_shape": list(setup.shape),
        "parameters": sum(p.numel() for p in setup.model.parameters()),
    }
    result = CaseResult("meanflow-step", kind, conditions, errors, ceilings, rows, environment())
    path = write_result(result, out)
    console = Console()
    console.print(result_table(result))
    console.print("MeanFlow over flow matching: " + ", ".join(_ratios(rows)))
    console.print(f"relative errors against fp64: {errors}; written to {path}")
    return path


def _ratios(rows: list[Row]) -> list[str]:
    return [
        f"{r.extra['ratio']:.0%} {r.extra['over_flow_matching']:.2f}x (floor {1 + r.extra['ratio'] / 3:.2f})"
        for r in rows
        if "ratio" in r.extra
    ]
