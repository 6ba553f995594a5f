"""What the norms' bench computes, and how far it is from fp64."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.cases.jvp.common import Errors, Setup, error_beside_eager
from benchmarks.cases.jvp.shapes import NormShape
from fullstride.jvp.implementation import chosen as chosen_implementation
from fullstride.jvp.norms.register import ADA_LAYER_NORM, GROUP_NORM, LAYER_NORM, RMS_NORM
from fullstride.measure.timing import Call

OPS = {op.name: op for op in (GROUP_NORM, LAYER_NORM, RMS_NORM, ADA_LAYER_NORM)}
EPS = 1e-5
NAMES = {"detached": ("dx", "dweight", "dbias"), "through": ("dx", "dtx", "dweight", "dbias")}


@dataclass
class Problem:
    """The tensors of one norm: x, its tangent, the parameters, and gradients of the output and its tangent."""

    shape: NormShape
    x: Tensor
    tx: Tensor
    parameters: list[Tensor]
    gradients: list[Tensor]

    @classmethod
    def draw(cls, shape: NormShape, setup: Setup) -> "Problem":
        """Normal numbers; parameters are fp32, as autocast leaves them, but modulations are activations."""
        x, tx, gy, gty = (_laid(setup.randn(*shape.size), shape) for _ in range(4))
        dtype = setup.dtype if shape.op == "ada_layer_norm" else torch.float32
        count = 1 if shape.op == "rms_norm" else 2
        parameters = [setup.randn(*shape.parameters).to(dtype) for _ in range(count)]
        return cls(shape, x, tx, parameters, [gy, gty])

    def double(self) -> "Problem":
        """The same in fp64."""
        x, tx, *gradients = (_laid(a.double(), self.shape) for a in (self.x, self.tx, *self.gradients))
        return Problem(self.shape, x, tx, [p.double() for p in self.parameters], gradients)

    def leaves(self) -> "Problem":
        """The same with x, its tangent and the parameters as leaves of a graph."""
        x, tx, *parameters = (a.detach().requires_grad_() for a in (self.x, self.tx, *self.parameters))
        return Problem(self.shape, x, tx, parameters, self.gradients)


Dual = Callable[[Problem], tuple[Tensor, Tensor]]


def _laid(x: Tensor, shape: NormShape) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last) if shape.channels_last else x


def ours(implementation: str, through: bool) -> Dual:
    """The op on pairs."""

    def run(problem: Problem) -> tuple[Tensor, Tensor]:
        shape, name = problem.shape, chosen_implementation(implementation, problem.x)
        settings = (shape.groups, EPS, shape.act or "", None, name) if shape.op == "group_norm" else (EPS, None, name)
        absent = [None] * len(problem.parameters)
        y, ty = OPS[shape.op]((problem.x, *problem.parameters), (problem.tx, *absent), settings, through)
        assert ty is not None
        return y, ty

    return run


def _library(problem: Problem, x: Tensor) -> Tensor:
    shape, p = problem.shape, problem.parameters
    if shape.op == "group_norm":
        # Torch's derivative of a group norm in channels_last fails; half precision wants its parameters alike.
        y = F.group_norm(x.contiguous(), shape.groups, *(a.to(x.dtype) for a in p), eps=EPS)
        return y if shape.act is None else F.silu(y)
    if shape.op == "ada_layer_norm":
        one = (shape.size[0], *[1] * (x.ndim - 2), shape.size[-1])
        return F.layer_norm(x, x.shape[-1:], eps=EPS) * (1 + p[0].reshape(one)) + p[1].reshape(one)
    if shape.op == "rms_norm":
        return F.rms_norm(x, x.shape[-1:], p[0].to(x.dtype), eps=EPS)
    return F.layer_norm(x, x.shape[-1:], *(a.to(x.dtype) for a in p), eps=EPS)


def eager(problem: Problem) -> tuple[Tensor, Tensor]:
    """torch.func.jvp of the library's op."""
    y, ty, *_ = torch.func.jvp(lambda x: _library(problem, x), (problem.x,), (problem.tx,))
    return y, ty


def results(run: Dual, problem: Problem, kind: str) -> dict[str, Tensor]:
    """Outputs, and gradients by `detached` or `through`."""
    outputs, gradients = run(problem), backward(run, problem, kind)()
    names = ("y", "ty", *NAMES[kind])  # the last is absent where there is no bias
    return {name: x.detach() for name, x in zip(names, (*outputs, *gradients), strict=False)}


def backward(run: Dual, problem: Problem, kind: str) -> Call:
    """The backward pass, of x, of its tangent if `through`, and of the parameters; the forward pass is run here."""
    leaves = problem.leaves()
    outputs, asked = run(leaves), [leaves.x, leaves.tx]
    if kind == "detached":
        outputs, asked = outputs[:1], asked[:1]
    gradients = problem.gradients[: len(outputs)]
    return lambda: torch.autograd.grad(outputs, [*asked, *leaves.parameters], gradients, retain_graph=True)


def gate(setup: Setup, problem: Problem, kind: str) -> Errors:
    """Errors of outputs and gradients, ours and eager's in the same format; GateError if ours is wrong; then nothing of
    this size is timed.
    """
    through = kind == "through"
    right = results(ours("plain", through), problem.double(), kind)
    found, by_eager = results(ours(setup.implementation, through), problem, kind), results(eager, problem, kind)
    if through and "layer" in problem.shape.op:
        by_eager.pop("dx")  # torch's own gradient through the derivative of a LayerNorm is wrong
    return {
        name: error_beside_eager(f"{problem.shape} {name}", found[name], right[name], by_eager.get(name))
        for name in right
    }
