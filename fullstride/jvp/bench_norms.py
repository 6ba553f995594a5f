"""`fullstride bench jvp-norms`: norms with their derivatives, in bytes a second beside those of a copy.

Of each norm and size the dual forward pass, the backward pass whose tangent is detached, and the one through it.
Counted are activations read and written once: 4 forward (x, its tangent, y, its tangent), 3 backward detached (the
gradient, x, x's gradient), 6 through (both gradients, x, its tangent, both of x's gradients). Beside them eager's jvp,
torch.func.jvp of the library's own op. Errors are against the plain form in fp64.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fullstride.bench.environment import environment
from fullstride.bench.results import CaseResult, Row, write_result
from fullstride.device import resolve_device
from fullstride.errors import one_of
from fullstride.jvp.bench_common import (
    Errors,
    Setup,
    by_format,
    error_beside_eager,
    flat,
    make_setup,
    merged,
    show,
    without_graph,
)
from fullstride.jvp.implementation import chosen as chosen_implementation
from fullstride.jvp.norms.pairs import ADA_LAYER_NORM, GROUP_NORM, LAYER_NORM, RMS_NORM
from fullstride.jvp.shapes import NORMS, NORMS_ODD, NORMS_SMALL, NormShape

SHAPES = {"small": NORMS_SMALL, "models": NORMS, "odd": NORMS_ODD, "all": [*NORMS, *NORMS_ODD]}
OPS = {op.name: op for op in (GROUP_NORM, LAYER_NORM, RMS_NORM, ADA_LAYER_NORM)}
EPS = 1e-5
PASSES = {"forward": 4, "detached": 3, "through": 6}
NAMES = ("dx", "dtx")
FORMATS = ("bf16", "fp16", "fp32")


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

    def leaves(self) -> list[Tensor]:
        """x and its tangent as leaves of a graph."""
        return [a.detach().requires_grad_() for a in (self.x, self.tx)]

    def passes(self, kind: str) -> int:
        """Bytes of that many activations."""
        return PASSES[kind] * self.x.nbytes


Dual = Callable[[Problem, Tensor, Tensor], tuple[Tensor, Tensor]]  # of a problem's x and tangent


def _laid(x: Tensor, shape: NormShape) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last) if shape.channels_last else x


def ours(implementation: str, through: bool) -> Dual:
    """The op on pairs."""

    def run(problem: Problem, x: Tensor, tx: Tensor) -> tuple[Tensor, Tensor]:
        shape, name = problem.shape, chosen_implementation(implementation, x)
        settings = (shape.groups, EPS, shape.act or "", name) if shape.op == "group_norm" else (EPS, name)
        absent = [None] * len(problem.parameters)
        y, ty = OPS[shape.op]((x, *problem.parameters), (tx, *absent), settings, through)
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


def eager(problem: Problem, x: Tensor, tx: Tensor) -> tuple[Tensor, Tensor]:
    """torch.func.jvp of the library's op."""
    y, ty, *_ = torch.func.jvp(lambda x: _library(problem, x), (x,), (tx,))
    return y, ty


def results(run: Dual, problem: Problem, through: bool) -> dict[str, Tensor]:
    """Outputs, and gradients of x and its tangent."""
    y, ty = run(problem, problem.x, problem.tx)
    found = _backward(run, problem, through)()
    return {name: x.detach() for name, x in zip(("y", "ty", *NAMES), (y, ty, *found), strict=False)}


def gate(setup: Setup, problem: Problem, through: bool) -> Errors:
    """Errors of outputs and gradients, ours and eager's in the same format.

    Raises:
        GateError: if ours is wrong; then nothing of this size is timed.

    """
    right = results(ours("plain", through), problem.double(), through)
    found, by_eager = results(ours(setup.implementation, through), problem, through), results(eager, problem, through)
    if through and "layer" in problem.shape.op:
        by_eager.pop("dx")  # torch's own gradient through the derivative of a LayerNorm is wrong
    return {
        name: error_beside_eager(f"{problem.shape} {name}", found[name], right[name], by_eager.get(name))
        for name in right
    }


def rows_of(setup: Setup, problem: Problem, detached: Errors, through: Errors) -> Iterator[Row]:
    """Forward and both backward passes, ours and eager's."""
    shape = str(problem.shape)
    for who, run in (("ours", ours(setup.implementation, through=False)), ("eager", eager)):
        own = {n: through[n] for n in ("y", "ty")} if who == "ours" else {}
        call = without_graph(run, problem, problem.x, problem.tx)
        yield setup.row(shape, "forward", who, call, 0, problem.passes("forward"), own)
    for kind, errors in (("detached", detached), ("through", through)):
        full = kind == "through"
        for who, run in (("ours", ours(setup.implementation, full)), ("eager", eager)):
            own = {n: errors[n] for n in NAMES if n in errors} if who == "ours" else {}
            yield setup.row(shape, kind, who, _backward(run, problem, full), 0, problem.passes(kind), own)


def _backward(run: Dual, problem: Problem, through: bool) -> Callable[[], Any]:
    leaves, gradients = problem.leaves(), problem.gradients
    y, ty = run(problem, leaves[0], leaves[1])
    outputs, asked = ((y, ty), leaves) if through else ((y,), leaves[:1])
    return lambda: torch.autograd.grad(outputs, asked, gradients[: len(asked)], retain_graph=True)


def rows(setup: Setup, shapes: list[NormShape]) -> list[Row]:
    """Gate and time each norm."""
    measured = []
    for shape in shapes:
        problem = Problem.draw(shape, setup)
        detached, through = gate(setup, problem, through=False), gate(setup, problem, through=True)
        measured += rows_of(setup, problem, detached, through)
    return measured


def _errors(setup: Setup) -> Errors:
    """The largest of all norms."""
    found: Errors = {}
    for shape in NORMS_SMALL:
        found = merged(found, gate(setup, Problem.draw(shape, setup), through=True))
    return found


def run(*, device: str, precision: str, implementation: str, shapes: str | None, out: Path) -> Path:
    """Gate, measure, print the table and write the JSON, whose path is returned.

    Args:
        device: where.
        precision: bf16, fp16 or fp32, of the activations.
        implementation: `auto`, `plain` or `triton`.
        shapes: a list of sizes by name; None is `small` on a processor, else `models`.
        out: the folder of results.

    Returns:
        The file written.

    Raises:
        ConfigError: for a device, format or list that there is not.
        GateError: if a result is wrong.

    """
    chosen = resolve_device(device)
    one_of("--precision", precision, FORMATS)
    if shapes is not None:
        one_of("--shapes", shapes, SHAPES)
    sizes = SHAPES[shapes] if shapes else NORMS_SMALL if chosen.type == "cpu" else NORMS
    setup = make_setup(chosen, precision, implementation)
    errors, measured = by_format(setup, FORMATS, _errors), rows(setup, sizes)
    conditions = {"precision": precision, "backend": implementation, "shapes": [str(s) for s in sizes]}
    gates = flat(errors)
    result = CaseResult("jvp-norms", chosen.type, conditions, gates, setup.ceilings, measured, environment())
    path = write_result(result, out)
    show(result, errors, "GB/s", lambda row: f"{row.extra['bytes'] / row.timing.median_ms / 1e6:.4g}", path)
    return path
