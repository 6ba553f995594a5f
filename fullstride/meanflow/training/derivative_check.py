"""Check of du/dt, once before the first step, on the network and the data that are to be trained.

A wrong derivative trains: the loss falls, to a network that samples badly. So it is held against fp64.
"""

import copy
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fullstride.device import memory
from fullstride.device.precision import autocast
from fullstride.device.triton_compile import compile_only, compiles
from fullstride.errors import ConfigError, OutOfMemory, is_out_of_memory
from fullstride.jvp import TangentError, TangentReport, check_tangents
from fullstride.meanflow.config.schema import TrainConfig
from fullstride.meanflow.objective.derivative import Conditions, labelled, velocity_and_some_derivatives
from fullstride.meanflow.objective.loss import MeanFlowLoss, conditional_velocity, interpolate
from fullstride.meanflow.training.state import RunState
from fullstride.meanflow.training.step import RecordObjective, randomize_zero_layers
from fullstride.step.torch.runners.backends import with_own_code

SAMPLES = 2
# The square root of the spacing (eps) of the factors of products: half the digits are left for errors to add up.
TOLERANCE = {"fp32": 2.0**-11.5, "tf32": 2.0**-5, "bf16": 2.0**-3.5}
# A difference is rough by nature, and held against finer ones: the network may have no forward derivative. In fp32 its
# step of 5e-3 leaves an error of 1e-4 to 1.5e-2, the larger where times turn by 64 radians a unit. In bf16 the rounding
# of u over the step is 0.3 to 1.5 of the derivative: that is refused.
DIFFERENCE_TOLERANCE = 0.25


class _Conditioned(nn.Module):
    """u(z, r, t) under given conditions."""

    def __init__(self, model: nn.Module, conditions: Conditions):
        super().__init__()
        self.model, self.conditions = model, conditions

    def forward(self, z: Tensor, r: Tensor, t: Tensor) -> Tensor:
        return self.model(z, r, t, **self.conditions)


def check_derivative(
    config: TrainConfig, objective: RecordObjective, state: RunState, raw: Tensor, labels: Tensor
) -> dict[str, Any] | None:
    """Compare du/dt as the run computes it, backend, precision and compiler, with fp64, on two samples.

    The network is a copy of the present one in eval mode (dropout draws others in fp64), in which layers that are as
    good as zero are random: many start so, and behind them nothing would be seen. All random numbers are the check's
    own, so that the run is the same to the last bit with and without it.

    Args:
        config: the run's configuration.
        objective: the objective that it minimises.
        state: the run's state, which is not changed.
        raw: records (b, ...), as for a step.
        labels: labels (b,) of the records.

    Returns:
        Errors, tolerance and seconds for the log; None if nothing is differentiated, or if weights are not
        finite, which the guard reports.

    Raises:
        ConfigError: if the derivative is wrong: the worst element, received and expected.
        OutOfMemory: if the check does not fit.

    """
    finite = all(bool(p.isfinite().all()) for p in state.model.parameters())
    if objective.meanflow.ratio == 0 or not finite:
        return None
    start, device = time.perf_counter(), raw.device
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            report = _report(config, objective, state.model, raw[:SAMPLES], labels[:SAMPLES])
    except TangentError as error:
        backend = config.loss.jvp_backend
        other = "loss.jvp_backend=finite_difference, which needs no derivative of any operation"
        if backend == "finite_difference":
            other = "loss.jvp_backend=func, or add loss.jvp_precision=fp32"
        elif objective.meanflow.split == "shared":
            other = "loss.split=static, which uses other derivative rules"
        raise ConfigError(
            f"loss.jvp_backend={backend} backend={config.backend} precision={config.precision}: du/dt of "
            f"model={config.model.name} is wrong before the first step: {error}. Repair the network, or use {other}; "
            "set guard.check_tangents=false to train anyway"
        ) from None
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(
            f"out of memory in the check of du/dt before the first step: the peak was "
            f"{memory.peak_memory(device) / memory.GIB:.2f} GiB; it holds two more copies of the network, one in fp64, "
            f"and {SAMPLES} samples; set guard.check_tangents=false to skip it"
        ) from None
    finally:
        memory.release(device)
    errors = {"output": report.output, "tangent": report.tangent, "difference": report.difference}
    seconds = time.perf_counter() - start
    return {"backend": objective.meanflow.backend, "tolerance": report.tolerance, **errors, "seconds": seconds}


def _report(
    config: TrainConfig, objective: RecordObjective, network: nn.Module, raw: Tensor, labels: Tensor
) -> TangentReport:
    loss = objective.meanflow
    generator = torch.Generator(raw.device).manual_seed(config.seed)
    x, conditions = objective.inputs(raw, generator)
    e, t, r = replace(loss, ratio=1.0).draw(x, generator)
    conditions |= labelled(labels if objective.conditional else None)
    model = randomize_zero_layers(copy.deepcopy(network).eval(), generator)
    difference = loss.backend == "finite_difference"
    with autocast(config.precision, raw.device):
        return check_tangents(
            _Conditioned(model, conditions),
            (interpolate(x, e, t), r, t),
            (conditional_velocity(x, e), None, torch.ones_like(t)),
            tolerance=DIFFERENCE_TOLERANCE if difference else TOLERANCE[config.precision],
            transform=_transform(config, loss, model, conditions),
            values_only=difference,
        )


def _transform(config: TrainConfig, loss: MeanFlowLoss, model: nn.Module, conditions: Conditions) -> Callable:
    """Derivative as a step takes it, of the module itself and not of the wrapper around it in `check_tangents`."""
    take: Callable = _among_others if loss.split == "shared" and loss.ratio < 1 else loss.velocity_and_derivative
    if "compile" in config.backend and not config.guard.check_step:  # which compares the compiled step itself
        take = torch.compile(with_own_code(take), fullgraph=True, dynamic=False)

    def taken(_: Callable, primals: tuple, tangents: tuple) -> tuple:
        device = primals[0].device
        if compiles(device):
            with compile_only(device):
                take(model, *primals, tangents[0], conditions)
        return take(model, *primals, tangents[0], conditions)

    return taken


def _among_others(
    model: nn.Module, z: Tensor, r: Tensor, t: Tensor, v: Tensor, conditions: Conditions
) -> tuple[Tensor, Tensor]:
    """Derivative of the samples next to one that carries no tangent, as in a step."""
    z, r, t = (torch.cat([x, x[:1]]) for x in (z, r, t))
    more = {k: torch.cat([c, c[:1]]) for k, c in conditions.items()}
    u, dudt = velocity_and_some_derivatives(model, z, r, t, v, more)
    return u[: len(v)], dudt
