"""`python -m benchmarks jvp-norms`: norms with their derivatives, in bytes per second compared with a copy.

Three passes are timed for each norm and size: the dual forward pass, the backward pass with a detached tangent, and the
backward pass through the tangent. Activations count as read and written once: 4 forward (x, its tangent, y, its
tangent), 3 backward detached (the gradient, x, x's gradient), 6 through (both gradients, x, its tangent, both of x's
gradients); parameters have gradients, too. The bound is a copy of as many bytes; both rotate through sets of tensors
that exceed a GPU's cache. They are compared with eager: torch.func.jvp of the library's own op. Errors are against
PyTorch operations in fp64.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.cases.jvp.common import Entry, Errors, OpSetup, OpWork, error_beside_eager, without_graph
from benchmarks.cases.jvp.run import OpsBench, Rates
from benchmarks.cases.jvp.shapes import NORMS, NORMS_ODD, NORMS_SMALL, NormShape
from benchmarks.cases.jvp.timing import sets_beyond
from fullstride.jvp.implementation import chosen as chosen_implementation
from fullstride.jvp.norms.register import ADA_LAYER_NORM, GROUP_NORM, LAYER_NORM, RMS_NORM
from fullstride.measure.roofline import RooflineBound
from fullstride.measure.timing import Call

OPS = {op.name: op for op in (GROUP_NORM, LAYER_NORM, RMS_NORM, ADA_LAYER_NORM)}
EPS = 1e-5
NAMES = {"detached": ("dx", "dweight", "dbias"), "through": ("dx", "dtx", "dweight", "dbias")}
SHAPES = {"small": NORMS_SMALL, "models": NORMS, "odd": NORMS_ODD, "all": [*NORMS, *NORMS_ODD]}
# Activations read or written once, there before, and there at the end of each pass.
PASSES = {"forward": 4, "detached": 3, "through": 6}
GIVEN = {"forward": 2, "detached": 3, "through": 4}
HELD = {"forward": 4, "detached": 5, "through": 8}
FORMATS = ("bf16", "fp16", "fp32")
CACHE = {"cuda": 64 << 20, "cpu": 0}  # a Hopper's second level; of a processor small sizes only are measured


@dataclass
class Problem:
    """Tensors of one norm: x, its tangent, the parameters, and gradients of the output and its tangent."""

    shape: NormShape
    x: Tensor
    tx: Tensor
    parameters: list[Tensor]
    gradients: list[Tensor]

    @classmethod
    def draw(cls, shape: NormShape, setup: OpSetup) -> "Problem":
        """Draw normally distributed tensors; parameters are fp32 as under autocast, but modulations are activations."""
        x, tx, gy, gty = (_laid(setup.randn(*shape.size), shape) for _ in range(4))
        dtype = setup.dtype if shape.op == "ada_layer_norm" else torch.float32
        count = 1 if shape.op == "rms_norm" else 2
        parameters = [setup.randn(*shape.parameters).to(dtype) for _ in range(count)]
        return cls(shape, x, tx, parameters, [gy, gty])

    def double(self) -> "Problem":
        """Return this problem in fp64."""
        x, tx, *gradients = (_laid(a.double(), self.shape) for a in (self.x, self.tx, *self.gradients))
        return Problem(self.shape, x, tx, [p.double() for p in self.parameters], gradients)

    def leaves(self) -> "Problem":
        """Return this problem with x, its tangent and the parameters as leaves of a graph."""
        x, tx, *parameters = (a.detach().requires_grad_() for a in (self.x, self.tx, *self.parameters))
        return Problem(self.shape, x, tx, parameters, self.gradients)


Dual = Callable[[Problem], tuple[Tensor, Tensor]]


def _laid(x: Tensor, shape: NormShape) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last) if shape.channels_last else x


def ours(implementation: str, through: bool) -> Dual:
    """Run our op on pairs of primal and tangent."""

    def run(problem: Problem) -> tuple[Tensor, Tensor]:
        shape, name = problem.shape, chosen_implementation(implementation, problem.x)
        settings = (shape.groups, EPS, shape.act or "", None, name) if shape.op == "group_norm" else (EPS, None, name)
        unmoved, absent = [None] * (shape.op == "group_norm"), [None] * len(problem.parameters)
        primals, tangents = (problem.x, *unmoved, *problem.parameters), (problem.tx, *unmoved, *absent)
        y, ty = OPS[shape.op](primals, tangents, settings, through)
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
    """Run torch.func.jvp of the library's op."""
    y, ty, *_ = torch.func.jvp(lambda x: _library(problem, x), (problem.x,), (problem.tx,))
    return y, ty


def results(run: Dual, problem: Problem, kind: str) -> dict[str, Tensor]:
    """Return outputs, and gradients by `detached` or `through`."""
    outputs, gradients = run(problem), backward(run, problem, kind)()
    names = ("y", "ty", *NAMES[kind])  # the last is absent where there is no bias
    return {name: x.detach() for name, x in zip(names, (*outputs, *gradients), strict=False)}


def backward(run: Dual, problem: Problem, kind: str) -> Call:
    """Return the backward pass for x, its tangent if `through`, and the parameters; the forward pass is run here."""
    leaves = problem.leaves()
    outputs, asked = run(leaves), [leaves.x, leaves.tx]
    if kind == "detached":
        outputs, asked = outputs[:1], asked[:1]
    gradients = problem.gradients[: len(outputs)]
    return lambda: torch.autograd.grad(outputs, [*asked, *leaves.parameters], gradients, retain_graph=True)


def gate(setup: OpSetup, problem: Problem, kind: str) -> Errors:
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


def rows(setup: OpSetup, shape: NormShape) -> Iterator[Entry]:
    """Check a norm, and return the rows of its forward pass and both backward passes, ours and eager's."""
    problem = Problem.draw(shape, setup)
    detached, through = gate(setup, problem, "detached"), gate(setup, problem, "through")
    errors = {
        "forward": {n: through[n] for n in ("y", "ty")},
        "detached": {n: e for n, e in detached.items() if n in NAMES["detached"]},
        "through": {n: e for n, e in through.items() if n in NAMES["through"]},
    }
    return _timed(setup, problem, errors)


def _timed(setup: OpSetup, problem: Problem, errors: dict[str, Errors]) -> Iterator[Entry]:
    shape, one = problem.shape, problem.x.nbytes
    for kind, passes in PASSES.items():
        sets = sets_beyond(CACHE[setup.device.type], passes * one)
        problems = [problem, *(Problem.draw(shape, setup) for _ in range(sets - 1))]
        least = RooflineBound(0.0, setup.copies.ms(passes * one, sets))
        for who, run in (("ours", ours(setup.implementation, kind == "through")), ("eager", eager)):
            own = errors[kind] if who == "ours" else {}
            sizes = (passes * one, GIVEN[kind] * one, HELD[kind] * one)
            work = OpWork(str(shape), kind, who, 0, *sizes, errors=own)

            def make(i: int, run: Dual = run, kind: str = kind, problems: list[Problem] = problems) -> Call:
                return without_graph(run, problems[i]) if kind == "forward" else backward(run, problems[i], kind)

            yield setup.row(work, make, sets, least)


def compile_once(setup: OpSetup, shape: NormShape, kind: str) -> None:
    """Run our forward and backward pass once, so that the kernels compile."""
    results(ours(setup.implementation, kind == "through"), Problem.draw(shape, setup), kind)


def _errors(setup: OpSetup, shape: NormShape) -> Errors:
    return gate(setup, Problem.draw(shape, setup), "through")


RATES: Rates = {
    "GB/s": lambda row: f"{row.extra['bytes'] / row.timing.median_ms / 1e6:.4g}",
    "of copy": lambda row: f"{1 / row.over_floor:.0%}",
}
USUAL = {"cpu": "small", "cuda": "models"}
BENCH = OpsBench("jvp-norms", FORMATS, SHAPES, USUAL, NORMS_SMALL, compile_once, rows, _errors, RATES)
