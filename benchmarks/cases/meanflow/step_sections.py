"""Cases of each of the step's tables.

Other ways to compute the step stand under letters: A compiles the network alone and A2 lets the compiler capture the
loss, which a section of its own does after a search for the fastest kernels; B takes the JVP from two VJPs; C writes
the derivatives of norms and attention out, which is what `fullstride.jvp` does and all other rows rest on; D splits the
derivative in two, or the batch in parts; E sends the whole batch through the JVP; F captures the JVP alone, G the
network with its backward pass, H the JVP beside an eager prediction; I computes with dual tensors. `two passes` is no
letter: the samples in the JVP and the others apart, where a run takes all together. Ways that are said to be
impossible are tried all the same, and their errors are reported.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.cases.meanflow.step_cases import Make, Pass, StepCase, StepLoss, plain_loss
from benchmarks.cases.meanflow.step_gate import TOLERANCE
from benchmarks.cases.meanflow.step_setup import Drawn, StepSetup
from fullstride.device.cuda_graph import CudaGraph
from fullstride.errors import ConfigError
from fullstride.jvp import jvp
from fullstride.jvp.implementation import only_plain
from fullstride.meanflow.models.dit import DiT
from fullstride.meanflow.models.mit import MiT
from fullstride.meanflow.models.x_prediction import XPrediction
from fullstride.meanflow.objective.alpha_flow import AlphaFlow
from fullstride.meanflow.objective.derivative import Conditions, velocity_and_derivative
from fullstride.meanflow.objective.improved import ImprovedMeanFlow
from fullstride.meanflow.objective.improved_whole import WholeImprovedMeanFlow
from fullstride.meanflow.objective.loss import Draw, MeanFlowLoss, Metrics
from fullstride.meanflow.objective.teacher import Teacher
from fullstride.meanflow.objective.terminal_velocity import TerminalVelocityMatching
from fullstride.step.torch.runners.graph import WARM

Way = Callable[..., tuple[Tensor, Tensor]]
RATIOS = (1.0, 0.75, 0.25, 0.5)  # what is asked for most comes first, as time may run out
SHARES = (0.25, 0.5, 0.75, 1.0)
BATCHES = (16, 32, 64, 128, 256, 512)
FLOW_MATCHING = "FM MSE"


@dataclass(frozen=True)
class LossBy(MeanFlowLoss):
    """MeanFlow's loss with another way to compute u and du/dt."""

    way: Way = velocity_and_derivative

    def velocity_and_derivative(
        self, model: Any, z: Tensor, r: Tensor, t: Tensor, v: Tensor, conditions: Conditions
    ) -> tuple[Tensor, Tensor]:
        """Compute u and du/dt in the given way."""
        return self.way(model, z, r, t, v)


def by(way: Callable[[], Way]) -> Make:
    """Return the loss with a way that is made for it."""

    def make(setup: StepSetup, loss: MeanFlowLoss) -> StepLoss:
        given = {each.name: getattr(loss, each.name) for each in fields(loss) if each.init}
        return plain_loss(setup, LossBy(**given, way=way()))

    return make


def torch_jvp(model: nn.Module, z: Tensor, r: Tensor, t: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Compute PyTorch's own derivative of PyTorch operations, with its graph."""
    with only_plain(), sdpa_kernel([SDPBackend.MATH]):
        u, dudt, *_ = torch.func.jvp(lambda z, t: model(z, r, t), (z, t), (v, torch.ones_like(t)))
    return u, dudt.detach()


def two_vjps(model: nn.Module, z: Tensor, r: Tensor, t: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Compute J v as the derivative of w -> J^T w along v; both passes are reverse-mode."""
    z, t = z.detach().requires_grad_(), t.detach().requires_grad_()
    with only_plain(), sdpa_kernel([SDPBackend.MATH]):
        u = model(z, r, t)
        w = torch.zeros_like(u, requires_grad=True)
        back = torch.autograd.grad(u, (z, t), w, create_graph=True)
        (dudt,) = torch.autograd.grad(back, w, (v, torch.ones_like(t)), retain_graph=True)
    return u, dudt.detach()


def split(model: nn.Module, z: Tensor, r: Tensor, t: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Compute v du/dz and du/dt with a JVP each."""
    u, along_z = jvp(lambda z: model(z, r, t), (z,), (v,))
    with torch.no_grad():
        _, along_t = jvp(lambda t: model(z, r, t), (t,), (torch.ones_like(t),))
    return u, along_z + along_t


class CapturedJvp:
    """JVP of the target as a CUDA graph, with an eager prediction."""

    def __init__(self) -> None:
        self._inputs: list[Tensor] = []
        self._graph: CudaGraph | None = None

    def __call__(self, model: nn.Module, *points: Tensor) -> tuple[Tensor, Tensor]:
        if self._graph is None:
            self._inputs = [x.clone() for x in points]
            for _ in range(WARM):
                self._derivative(model)
            self._graph = CudaGraph(partial(self._derivative, model), None)
        for own, given in zip(self._inputs, points, strict=True):
            own.copy_(given)
        return model(*points[:3]), self._graph.replay()

    def _derivative(self, model: nn.Module) -> Tensor:
        with torch.no_grad():
            z, r, t, v = self._inputs
            return velocity_and_derivative(model, z, r, t, v)[1]


class _Shared(nn.Module):
    """Network with another forward, which may be replaced."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, z: Tensor, r: Tensor, t: Tensor) -> Tensor:
        return self.model(z, r, t)


def compiled_model(setup: StepSetup, loss: MeanFlowLoss) -> StepLoss:
    """Return the step with the network compiled inside PyTorch's derivative."""
    model: Any = torch.compile(_Shared(setup.model), dynamic=False)
    inner = by(lambda: torch_jvp)(setup, loss)
    return lambda _, drawn: inner(model, drawn)


def special(setup: StepSetup, name: str, make: Make, backend: str, forwards: float = 4.0) -> StepCase:
    """Return a case that runs in only one way, which it brings along unless it is eager."""
    return StepCase(name, setup.loss(1.0), make, (backend,), ours=False, own=backend != "eager", forwards=forwards)


def compiler_mode(setup: StepSetup, mode: str) -> StepCase:
    """Return A2, the loss compiled in a mode of the compiler; all but the default have their own CUDA graphs."""
    make = lambda setup, loss: torch.compile(plain_loss(setup, loss), fullgraph=True, dynamic=False, mode=mode)  # noqa: E731
    return special(setup, f"A2: the loss compiled with {mode}", make, "compile+graph")


def graphed_callable(setup: StepSetup, loss: MeanFlowLoss) -> StepLoss:
    """Return the step with `torch.cuda.make_graphed_callables` of the network."""
    made: list[Any] = []

    def run(model: nn.Module, drawn: Drawn) -> Tensor:
        if not made:
            given = tuple(x.clone() for x in (drawn["x"], drawn["r"], drawn["t"]))
            made.append(torch.cuda.make_graphed_callables(_Shared(model), given))
        return loss.at(made[0], **drawn)[0]

    return run


def plain_operations(setup: StepSetup) -> StepCase:
    """Return the step with PyTorch's own derivative, the baseline of all others."""
    make = by(lambda: torch_jvp)
    return StepCase("torch.func.jvp of plain operations", setup.loss(1.0), make, ("eager", "graph"), ours=False)


def splits(setup: StepSetup, ratio: float) -> list[StepCase]:
    """Return the batch in one pass, with a tangent for some samples, and in two passes."""
    name = f"MeanFlow {ratio:.0%}"
    shared, static = (setup.loss(ratio, split=split) for split in ("shared", "static"))
    return [StepCase(name, shared), StepCase(f"{name}, two passes", static)]


def alternatives(setup: StepSetup) -> list[StepCase | Pass]:
    """Return the alternatives, with every sample in the JVP unless named otherwise."""
    loss, size = setup.loss, setup.options.batch_size
    part, half = max(1, size // 4), setup.precision == "bf16"
    other = "tf32" if half else "bf16"  # what autocast leaves alone is rounded to TF32 beside it
    near = TOLERANCE["bf16"]

    own = partial(special, setup)
    rounded = loss(1.0, backend="two_pass", precision=other)
    differences = loss(1.0, backend="finite_difference", precision="tf32" if half else None)
    return [
        StepCase("MeanFlow 100%", loss(1.0)),
        plain_operations(setup),
        own("A: the network compiled, torch.func.jvp around it", compiled_model, "compile"),
        own("B: the JVP by two VJPs", by(lambda: two_vjps), "eager", forwards=7.0),
        StepCase("D: split JVP", loss(1.0), by(lambda: split), forwards=6.0),
        StepCase(f"D: micro-batched JVP, {part} at once", loss(1.0, chunk=part)),
        *(case for ratio in (0.25, 0.75) for case in splits(setup, ratio)),
        StepCase("E: the whole batch in the JVP, ratio 25%", loss(0.25, split="full"), forwards=4.0),
        Pass("F: the JVP alone", "jvp"),
        own("G: make_graphed_callables", graphed_callable, "graph"),
        own("H: captured JVP, eager prediction", by(CapturedJvp), "graph", forwards=5.0),
        StepCase("H: two_pass", loss(1.0, backend="two_pass"), forwards=5.0),
        StepCase(f"H: two_pass, its JVP in {other}", rounded, forwards=5.0, tolerance=near),
        StepCase("I: forward_ad", loss(1.0, backend="forward_ad")),
        StepCase("finite difference", differences, ours=False, forwards=5.0, tolerance=near),
        compiler_mode(setup, "reduce-overhead"),
    ]


def name_of(ratio: float) -> str:
    """Return the name of a MeanFlow step with this ratio."""
    return f"MeanFlow {ratio:.0%}"


def counts_of(size: int) -> dict[int, float]:
    """Return the number of samples for each of `SHARES`, at least one; of equal numbers the largest share."""
    return {max(1, round(share * size)): share for share in SHARES}


def flow_matching(setup: StepSetup, batch: int | None = None) -> StepCase:
    """Return the flow matching step that all are compared with; every weight is 1."""
    return StepCase(FLOW_MATCHING, setup.loss(0.0, weighting_power=0.0), batch=batch)


def meanflow(setup: StepSetup, ratio: float, batch: int | None = None) -> StepCase:
    """Return a MeanFlow step with that share in the JVP, as a run uses it by default."""
    return StepCase(name_of(ratio), setup.loss(ratio, split="shared"), batch=batch)


def cases_of(section: str, setup: StepSetup) -> list[StepCase | Pass]:
    """Return the cases of a section, flow matching first."""
    first = flow_matching(setup)
    if section == "ratios":
        steps = [meanflow(setup, ratio) for ratio in RATIOS]
        # MeanFlow at 0 is flow matching with adaptive weights.
        passes = [Pass("forward", "forward"), Pass("JVP", "jvp"), Pass("JVP, prediction's graph kept", "target")]
        return [first, *steps, meanflow(setup, 0.0), *passes]
    if section == "backends":
        return [first, meanflow(setup, 0.25), meanflow(setup, 1.0)]
    if section == "alternatives":
        return [first, *alternatives(setup)]
    if section == "objectives":
        return [first, meanflow(setup, 0.75), *objectives(setup)]
    if section == "autotune":
        return [first, meanflow(setup, 1.0), compiler_mode(setup, "max-autotune")]
    if section == "scaling":
        size = setup.options.batch_size
        passes = [Pass("JVP", "jvp", batch=count) for count in counts_of(size)]
        return [first, *(meanflow(setup, share) for share in SHARES), *passes]
    if section == "batches":
        return [make for size in BATCHES for make in (flow_matching(setup, size), meanflow(setup, 1.0, size))]
    return [first, meanflow(setup, 1.0), plain_operations(setup)]  # profile


class InFp32(nn.Module):
    """Copy of a network that computes in fp32 whatever it is given: one function for a step and its reference."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = copy.deepcopy(model).eval().requires_grad_(False)

    def forward(self, z: Tensor, r: Tensor, t: Tensor) -> Tensor:
        return self.model(z.float(), r.float(), t.float()).to(z.dtype)


@dataclass(frozen=True)
class OfAnother(MeanFlowLoss):
    """MeanFlow's loss of another network over the same weights, for a step and its reference."""

    network: Callable[[nn.Module], nn.Module] = XPrediction

    def _value(self, model: Any, drawn: Draw) -> tuple[Tensor, Metrics]:
        return super()._value(self.network(model), drawn)


def decoupled(model: nn.Module) -> nn.Module:
    """Return a DiT over the same weights whose last third of the blocks sees r alone."""
    assert isinstance(model, DiT)
    other = copy.copy(model)
    other.decoupled_blocks = -(-len(model.blocks) // 3)
    return other


def objectives(setup: StepSetup) -> list[StepCase]:
    """Return the steps of the newer objectives, with three quarters of the samples in the derivative.

    Improved MeanFlow as a whole needs a network with a head for v; without classes there is no guidance in it.
    """
    ratio, plain = 0.75, setup.loss(0.75)
    given = {"times": plain.times, "weighting_power": plain.weighting_power, "weighting_eps": plain.weighting_eps}
    # Forward passes beyond flow matching's three, for each sample that is differentiated, and for all.
    found: list[tuple[str, MeanFlowLoss, float, float]] = [
        ("by a teacher", MeanFlowLoss(ratio, **given, teacher=Teacher(InFp32(setup.model))), 1.0, 1.0),
        ("alphaflow, a difference", AlphaFlow(ratio, **given, form="discrete"), 1.0, 0.0),
        ("imf", ImprovedMeanFlow(ratio, **given), 2.0, 0.0),
        ("tvm", TerminalVelocityMatching(ratio, **given), 4.0, 0.0),
        ("an image as the output", OfAnother(ratio, **given, split="static"), 1.0, 0.0),
    ]
    if isinstance(setup.model, DiT) and len(setup.model.blocks) > 1:
        found.append(("decoupled", OfAnother(ratio, **given, split="static", network=decoupled), 1.0, 0.0))
    if isinstance(setup.model, MiT):
        found.append(("imf_whole", WholeImprovedMeanFlow(ratio, **given), 2.0, 0.0))
    return [
        StepCase(f"{name_of(ratio)}, {name}", loss, forwards=3.0 + ratio * each + of_all)
        for name, loss, each, of_all in found
    ]


def chosen(case: StepCase | Pass, only: tuple[str, ...]) -> bool:
    """Return whether a case was requested; flow matching always is, because the ratios need it."""
    return not only or case.name == FLOW_MATCHING or any(part.lower() in case.name.lower() for part in only)


def expect_chosen(setup: StepSetup) -> None:
    """See that `--only` asks for something, before anything is measured: flow matching alone compares with nothing;
    ConfigError if no row of the sections has any of its parts in its name.
    """
    only = setup.options.only
    names = dict.fromkeys(case.name for section in setup.options.sections for case in cases_of(section, setup))
    if only and not any(part.lower() in name.lower() for part in only for name in names):
        raise ConfigError(
            f"--only {', '.join(only)}: no row has this in its name; expected a part of one of {'; '.join(names)}"
        )
