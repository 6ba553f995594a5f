"""Checks before the step's timings: values, losses and gradients against fp64.

The batch of a gate is as large as the one to be timed, and repeats some samples: a mean over it is that over these,
so that fp64, slow on most devices, sees each of them once, whatever the batch and the share in the JVP.
"""

import copy
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from benchmarks.cases.meanflow.step_setup import Drawn, StepSetup, progress_of
from fullstride.meanflow.objective.loss import MeanFlowLoss, conditional_velocity, interpolate
from fullstride.meanflow.objective.times import meanflow_count
from fullstride.measure.gate import require_close

SAMPLES, CHUNK = 16, 8
# The relative error against fp64 that a right step stays below: rounding grows through some 60 layers.
TOLERANCE = {"fp32": 2e-3, "tf32": 2e-2, "bf16": 1e-1}

Mean = tuple[Tensor, Tensor]  # a loss and its gradient, in fp64


@dataclass(frozen=True)
class Passed:
    """Outcome of a gate: relative errors, and the time of the first call, compilation included."""

    errors: dict[str, float]
    first_ms: float


def gradients(parameters: list[Tensor | None]) -> Tensor:
    """Concatenate all gradients."""
    return torch.cat([g.flatten() for g in parameters if g is not None])


def reference(loss: MeanFlowLoss, ratio: float) -> MeanFlowLoss:
    """Return the loss of that ratio in the plainest way, which is MeanFlow's for another way to its derivative."""
    if type(loss).__module__.startswith("fullstride.") or hasattr(loss, "network"):
        return replace(loss, ratio=ratio, split="static", backend="func", chunk=0, precision=None)
    return MeanFlowLoss(ratio, loss.times, loss.weighting_power, loss.weighting_eps)


@dataclass
class Exact:
    """Reference loss and gradients in fp64 of a few samples, which are drawn once."""

    setup: StepSetup
    samples: Drawn
    model: nn.Module
    _found: dict[tuple, Mean] = field(default_factory=dict)

    @classmethod
    def of(cls, setup: StepSetup) -> "Exact":
        """Draw the samples and copy the network into fp64, in which ops run as PyTorch operations."""
        drawn = setup.drawn(setup.loss(1.0), setup.images(SAMPLES))
        return cls(setup, drawn, copy.deepcopy(setup.model).double().eval())

    def batch(self, loss: MeanFlowLoss, size: int) -> Drawn:
        """Repeat the samples to a batch: first those in the JVP, then those with r = t."""
        curved = meanflow_count(loss.ratio, size)
        index = torch.cat([torch.arange(n, device=self.setup.device) % SAMPLES for n in (curved, size - curved)])
        drawn = {name: values[index] for name, values in self.samples.items()}
        straight = torch.arange(size, device=self.setup.device) >= curved
        # In the order of what is timed, for which the step is compiled.
        drawn |= {"x": self.setup.ordered(drawn["x"]), "r": torch.where(straight, drawn["t"], drawn["r"])}
        return drawn | progress_of(loss, drawn["x"])

    def step(self, loss: MeanFlowLoss, size: int) -> Mean:
        """Return the loss and the gradient of that batch."""
        curved = meanflow_count(loss.ratio, size)
        parts = [(n / size, self._mean(loss, ratio, n)) for ratio, n in ((1.0, curved), (0.0, size - curved)) if n]
        value, gradient = (sum(share * mean[i] for share, mean in parts) for i in range(2))
        assert isinstance(value, Tensor)
        assert isinstance(gradient, Tensor)
        return value, gradient

    def _mean(self, loss: MeanFlowLoss, ratio: float, count: int) -> Mean:
        """Return the mean over `count` samples in turn: whole rounds, and a last partial one."""
        whole, rest = divmod(count, SAMPLES)
        rounds = [(whole * SAMPLES, SAMPLES), (rest, rest)]
        parts = [(weight / count, self._round(loss, ratio, n)) for weight, n in rounds if weight]
        first, second = zip(*((share * a, share * b) for share, (a, b) in parts), strict=True)
        return torch.stack(first).sum(), torch.stack(second).sum(0)

    def _round(self, loss: MeanFlowLoss, ratio: float, count: int) -> Mean:
        """Return the mean over the first `count` samples, a few at a time to bound the memory."""
        plain = reference(loss, ratio)
        form = type(plain), plain.teacher is None, getattr(plain, "network", None)
        key = *form, ratio, count, loss.weighting_power, loss.weighting_eps
        if key not in self._found:
            self.model.zero_grad(set_to_none=True)
            total = torch.zeros((), dtype=torch.float64, device=self.setup.device)
            for start in range(0, count, CHUNK):
                part = {k: a[start : min(start + CHUNK, count)].double() for k, a in self.samples.items()}
                part |= progress_of(plain, part["x"])
                value = plain.at(self.model, **part if ratio else part | {"r": part["t"]})[0] * len(part["t"]) / count
                value.backward()
                total += value.detach()
            self._found[key] = total, gradients([p.grad for p in self.model.parameters()])
            self.model.zero_grad(set_to_none=True)
        return self._found[key]

    def values(self, size: int) -> tuple[Tensor, Tensor]:
        """Return u and du/dt for the batch of a loss of ratio 1."""
        loss, found = replace(self.setup.loss(1.0), backend="func"), []
        for start in range(0, SAMPLES, CHUNK):
            part = {k: a[start : start + CHUNK].double() for k, a in self.samples.items()}
            with torch.no_grad():
                found.append(loss.velocity_and_derivative(self.model, *points(part), {}))
        index = torch.arange(size, device=self.setup.device) % SAMPLES
        u, dudt = (torch.cat(x)[index] for x in zip(*found, strict=True))
        return u, dudt


def points(drawn: Drawn) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return z, r, t and v, as `velocity_and_derivative` takes them."""
    z = interpolate(drawn["x"], drawn["e"], drawn["t"])
    return z, drawn["r"], drawn["t"], conditional_velocity(drawn["x"], drawn["e"])


def require_all(names: tuple[str, ...], found: list[Tensor], right: list[Tensor], tolerance: float) -> dict[str, float]:
    """Return the relative errors; GateError if one is too large."""
    every = zip(names, found, right, strict=True)
    return {name: require_close(name, a.detach(), b.detach(), tolerance) for name, a, b in every}
