"""`python -m benchmarks jvp-norms`: norms with their derivatives, in bytes a second beside those of a copy.

Of each norm and size the dual forward pass, the backward pass whose tangent is detached, and the one through it.
Counted are activations read and written once: 4 forward (x, its tangent, y, its tangent), 3 backward detached (the
gradient, x, x's gradient), 6 through (both gradients, x, its tangent, both of x's gradients); parameters have
gradients, too. The floor is a copy of as many bytes, and both go in turn through sets of tensors that overflow a GPU's
cache. Beside them eager's jvp, torch.func.jvp of the library's own op. Errors are against the plain form in fp64.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from benchmarks.cases.jvp.common import (
    Entry,
    Errors,
    LeftOut,
    Setup,
    Work,
    broken,
    merged,
    without_graph,
)
from benchmarks.cases.jvp.norms_gate import NAMES, Dual, Problem, backward, eager, gate, ours, results
from benchmarks.cases.jvp.run import Bench, Rates
from benchmarks.cases.jvp.shapes import NORMS, NORMS_ODD, NORMS_SMALL, NormShape
from benchmarks.cases.jvp.timing import Copies, sets_beyond
from benchmarks.harness.budget import NO_TIME, say
from fullstride.measure.roofline import Floor
from fullstride.measure.timing import Call

SHAPES = {"small": NORMS_SMALL, "models": NORMS, "odd": NORMS_ODD, "all": [*NORMS, *NORMS_ODD]}
# Activations read or written once, there before, and there at the end of each pass.
PASSES = {"forward": 4, "detached": 3, "through": 6}
GIVEN = {"forward": 2, "detached": 3, "through": 4}
HELD = {"forward": 4, "detached": 5, "through": 8}
FORMATS = ("bf16", "fp16", "fp32")
CACHE = {"cuda": 64 << 20, "cpu": 0}  # a Hopper's second level; of a processor small sizes only are measured


def rows_of(setup: Setup, problem: Problem, errors: dict[str, Errors], copies: Copies) -> Iterator[Entry]:
    """Forward and both backward passes, ours and eager's."""
    shape, one = problem.shape, problem.x.nbytes
    for kind, passes in PASSES.items():
        sets = sets_beyond(CACHE[setup.device.type], passes * one)
        problems = [problem, *(Problem.draw(shape, setup) for _ in range(sets - 1))]
        least = Floor(0.0, copies.ms(passes * one, sets))
        for who, run in (("ours", ours(setup.implementation, kind == "through")), ("eager", eager)):
            own = errors[kind] if who == "ours" else {}
            sizes = (passes * one, GIVEN[kind] * one, HELD[kind] * one)
            work = Work(str(shape), kind, who, 0, *sizes, errors=own)

            def make(i: int, run: Dual = run, kind: str = kind, problems: list[Problem] = problems) -> Call:
                return without_graph(run, problems[i]) if kind == "forward" else backward(run, problems[i], kind)

            yield setup.row(work, make, sets, least)


def rows(setup: Setup, shapes: list[NormShape]) -> list[Entry]:
    """Gate and time each norm."""
    copies = Copies(setup.clock, setup.device)
    return [entry for shape in shapes for entry in _measured(setup, shape, copies)]


def _measured(setup: Setup, shape: NormShape, copies: Copies) -> list[Entry]:
    if setup.budget.spent:
        return [LeftOut(str(shape), "all", "all", NO_TIME)]
    say(f"gate: {shape} against fp64")
    try:
        problem = Problem.draw(shape, setup)
        detached, through = gate(setup, problem, "detached"), gate(setup, problem, "through")
    except Exception as error:
        return [broken(str(shape), "all", "ours", error)]
    by_kind = {
        "forward": {n: through[n] for n in ("y", "ty")},
        "detached": {n: e for n, e in detached.items() if n in NAMES["detached"]},
        "through": {n: e for n, e in through.items() if n in NAMES["through"]},
    }
    return list(rows_of(setup, problem, by_kind, copies))


def compile_once(setup: Setup, shape: NormShape, kind: str) -> None:
    """Forward and backward pass of ours, for the kernels' sake."""
    results(ours(setup.implementation, kind == "through"), Problem.draw(shape, setup), kind)


def _kernels(setup: Setup, shapes: list[NormShape]) -> list[partial[None]]:
    """Those of the sizes, and those of the table of all formats."""
    every = [(setup, shape, kind) for shape in shapes for kind in NAMES]
    every += [(replace(setup, precision=name), shape, "through") for name in FORMATS for shape in NORMS_SMALL]
    return [partial(compile_once, *given) for given in every]


def _errors(setup: Setup) -> Errors:
    """The largest of all norms."""
    found: Errors = {}
    for shape in NORMS_SMALL:
        found = merged(found, gate(setup, Problem.draw(shape, setup), "through"))
    return found


RATES: Rates = {
    "GB/s": lambda row: f"{row.extra['bytes'] / row.timing.median_ms / 1e6:.4g}",
    "of copy": lambda row: f"{1 / row.over_floor:.0%}",
}
BENCH = Bench("jvp-norms", FORMATS, SHAPES, {"cpu": "small", "cuda": "models"}, _kernels, rows, _errors, RATES)
