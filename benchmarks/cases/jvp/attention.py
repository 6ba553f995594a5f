"""`python -m benchmarks jvp-attention`: attention with its derivative, forward and backward, compared with its peers.

Three passes are timed for each size: the dual forward pass, the backward pass with a detached tangent (the library's
problem, too), and the backward pass through the tangent. They are compared with `vanilla` (PyTorch's math attention
under torch.func.jvp), the library's primal alone, and jvp_flash_attention if it is installed. They count 6, 5 and 15
products of 2 B H L^2 D operations; the primal alone counts 2. A backward pass is timed alone, but its memory is that of
forward and backward together. Errors are of whole heads of the timed tensors, against PyTorch operations in fp64.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases.jvp.attention_gate import (
    MATRICES,
    NAMES,
    Problem,
    dual_ways,
    gate,
    libraries,
    library,
    of_another,
    ours,
    results,
    vanilla,
    work,
)
from benchmarks.cases.jvp.common import FORMATS, Entry, Errors, LeftOut, OpSetup, set_format, without_graph
from benchmarks.cases.jvp.run import OpsBench, Rates
from benchmarks.cases.jvp.shapes import ERRORS, ODD, REFERENCE, SMALL, SPEED, AttentionShape, distinct
from benchmarks.harness.budget import NO_MEMORY, reason
from fullstride.jvp.implementation import chosen as chosen_implementation
from fullstride.measure.timing import Call

COMPARABLE = [shape for shape in ODD if shape.k[2] > 1]  # the score of a single key has no gradient
LARGE = distinct([*SPEED, *REFERENCE])
SHAPES = {"small": SMALL, "reference": REFERENCE, "speed": SPEED, "large": LARGE, "odd": COMPARABLE}
SHAPES["all"] = [*LARGE, *COMPARABLE]
# Results of each pass.
MADE = {"forward": ("o", "to"), "detached": NAMES[:3], "through": NAMES}
# Errors by whose they are, or why it is not timed: what is wrong is not.
Judged = dict[str, Errors | str]


def forward_rows(setup: OpSetup, problem: Problem, judged: Judged) -> Iterator[Entry]:
    """Time the dual forward pass of every implementation, and the library's primal."""
    for who, way in dual_ways(setup, problem.shape, through=False).items():
        call = without_graph(way, *problem.inputs)
        yield _entry(setup, problem, "forward", who, judged, lambda call=call: call)
    for who, backends in libraries(setup).items():
        call = without_graph(library, *problem.inputs[:3], backends)
        yield setup.row(work(problem, "primal", who), lambda _, call=call: call)


def backward_rows(setup: OpSetup, problem: Problem, detached: Judged, through: Errors) -> Iterator[Entry]:
    """Time the backward pass without and with the tangent's gradient, for every implementation that has it."""
    leaves = problem.leaves()
    outputs: dict[str, Callable[[], Tensor]] = {
        who: lambda way=way: way(*leaves)[0] for who, way in dual_ways(setup, problem.shape, through=False).items()
    }
    outputs |= {who: partial(library, *leaves[:3], backends) for who, backends in libraries(setup).items()}
    for who, output in outputs.items():
        make = partial(_backward, output, leaves[:3], problem.gradients[0])
        yield _entry(setup, problem, "detached", who, detached, make)
    for who, way in dual_ways(setup, problem.shape, through=True).items():
        make = partial(_backward, partial(way, *leaves), leaves, problem.gradients)
        yield _entry(setup, problem, "through", who, {"ours": through}, make)


def _entry(setup: OpSetup, problem: Problem, kind: str, who: str, judged: Judged, make: Callable[[], Call]) -> Entry:
    """Return a timed pass with the errors of its results, or the reason why it is not timed."""
    own = judged.get(who, {})
    if isinstance(own, str):
        return LeftOut(str(problem.shape), kind, who, own)
    errors = {name: own[name] for name in MADE[kind] if name in own}
    return setup.row(work(problem, kind, who, errors), lambda _: make())


def _backward(forward: Callable[[], Any], leaves: list[Tensor], gradients: Any) -> Call:
    outputs = forward()
    return lambda: torch.autograd.grad(outputs, leaves, gradients, retain_graph=True)


def _gate(setup: OpSetup, problem: Problem, through: bool) -> Errors:
    part = problem.shape.matrix // (problem.shape.batch * problem.shape.k[1])
    eager = vanilla if setup.fits(MATRICES["through"] * part * 4) else None
    return gate(ours(setup, through), eager, problem, through, setup.precision)


def _others(setup: OpSetup, problem: Problem) -> Judged:
    """Time the other fused ops; the PyTorch-only implementations are the reference that ours is checked against."""
    found: Judged = {}
    for who, way in dual_ways(setup, problem.shape, through=False).items():
        if who not in ("ours", "vanilla"):
            try:
                found[who] = of_another(way, problem)
            except Exception as error:  # what it refuses or breaks at is no reason to lose the rest
                found[who] = reason(error)
    return found


def rows(setup: OpSetup, shape: AttentionShape) -> Iterable[Entry]:
    """Check a size that fits, and time it; the PyTorch implementation materialises the matrices of scores."""
    nothing = torch.empty(0, device=setup.device, dtype=setup.dtype)
    plain = chosen_implementation(setup.implementation, nothing) == "plain"
    if plain and not setup.fits(MATRICES["through"] * shape.matrix * 4):
        return [LeftOut(str(shape), "all", "ours", NO_MEMORY)]
    problem = Problem.draw(shape, setup)
    through, detached = _gate(setup, problem, through=True), _gate(setup, problem, through=False)
    others = _others(setup, problem)
    back = backward_rows(setup, problem, {"ours": detached, **others}, through)
    return chain(forward_rows(setup, problem, {"ours": through, **others}), back)


def compile_once(setup: OpSetup, shape: AttentionShape, kind: str) -> None:
    """Run our forward and backward pass once, so that the kernels compile."""
    set_format(setup)
    results(ours(setup, kind == "through"), Problem.draw(shape, setup), kind == "through")


def _errors(setup: OpSetup, shape: AttentionShape) -> Errors:
    return _gate(setup, Problem.draw(shape, setup), through=True)


RATES: Rates = {
    "GFLOP": lambda row: f"{row.extra['gflop']:.4g}",
    "TFLOP/s": lambda row: f"{row.extra['gflop'] / row.timing.median_ms:.3g}",
}
USUAL = {"cpu": "small", "cuda": "large"}
BENCH = OpsBench("jvp-attention", tuple(FORMATS), SHAPES, USUAL, [ERRORS], compile_once, rows, _errors, RATES)
