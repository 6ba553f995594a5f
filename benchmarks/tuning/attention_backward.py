"""Tuning of the attention backward: `python -m benchmarks.tuning.attention_backward --out OUT`; see `tuner`.

Launches do not depend on one another, so each is measured alone; the best way to put them together is then the sum that
is least, measured once more as a whole. Times are without the sums over rows that come first (`rows_ms`).
"""

import itertools
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases.jvp.shapes import SPEED
from benchmarks.tuning.tuner import Result, fastest_first, main, measured, say, time_ms
from fullstride.jvp.attention import backward_keys, backward_queries, naive
from fullstride.jvp.attention.backward import backward
from fullstride.jvp.attention.backward_table import BackwardConfig, Config, pick
from fullstride.jvp.attention.launch_forward import forward
from fullstride.measure.timing import Call

# (batch, heads, length, head dim, whether through the tangent)
CASES = {shape.name: (*shape.q, True) for shape in SPEED}
CASES |= {f"{shape.name}_primal": (*shape.q, False) for shape in SPEED if shape.name != "unet80"}
NAMES = ("dq", "dk", "dv", "dtq", "dtk", "dtv")
# Products that each gradient is counted for: 15 through the tangent, 5 without.
COUNTED = {True: 15, False: 5}
# Error bound of a correct candidate in bf16, relative to the norm of the gradient.
ALLOWED = 0.02
# Blocks of the walker's own rows and of those it walks over, and warps: with two or more accumulators, and with one.
NARROW = [(128, 32, 8), (64, 32, 4), (128, 64, 8)]
WIDE = [(128, 64, 8), (64, 64, 4), (128, 128, 8)]
LOADS = [(2, False), (3, False), (1, True), (2, True)]
# Ways to part the gradients of queries, and those of keys, among launches: with and without tangents.
WAYS = {
    True: (
        [("dq dtq",), ("dq", "dtq")],
        [("dk dtk dv dtv",), ("dk dtk", "dv dtv"), ("dk", "dtk dtv", "dv"), ("dk", "dtk", "dv dtv")],
    ),
    False: ([("dq",)], [("dk dv",), ("dk", "dv")]),
}


@dataclass(frozen=True)
class Problem:
    """Inputs and outputs of one attention, and fp64 gradients of its last head."""

    inputs: list[Tensor]
    saved: tuple[Any, ...]
    go: Tensor
    gto: Tensor | None
    scale: float
    expected: dict[str, Tensor]

    def gradients(self, config: Config) -> dict[str, Any]:
        """Return the gradients of the configuration's launches; the others are not written."""
        tensors: Any = (self.go, self.gto, *self.inputs, *self.saved)
        return dict(zip(NAMES, backward(*tensors, scale=self.scale, config=config), strict=True))

    def calls(self, config: Config) -> list[Call]:
        """Time a captured graph."""
        return [partial(self.gradients, config)] * (1 if self.go.numel() > 1e7 else 10)

    def error(self, found: dict[str, Any]) -> float:
        """Return the largest relative error of a computed gradient."""
        pairs = [(found[n][-1:, -1:].double(), y) for n, y in self.expected.items() if found[n] is not None]
        return max(((x - y).norm() / y.norm()).item() for x, y in pairs)

    def row(self, config: Config) -> Result:
        """Return the row of a configuration."""
        name = " + ".join(map(str, config))
        return measured(name, self.calls(config), self.error, ALLOWED, (backward_queries, backward_keys))


def make(case: tuple[int, int, int, int, bool]) -> Problem:
    """Draw random inputs in bf16."""
    *size, through = case
    x = [torch.randn(size, device="cuda", dtype=torch.bfloat16) for _ in range(8)]
    inputs, go, gto, scale = x[:6], x[6], x[7] if through else None, case[3] ** -0.5
    saved = forward(*inputs, scale=scale)
    exact: Any = [y[-1:, -1:].double() for y in (*inputs, go)]
    outputs: Any = naive.forward(*exact[:6], scale=scale)
    tangent = None if gto is None else gto[-1:, -1:].double()
    arguments: Any = (exact[6], tangent, *exact[:6], *outputs)
    gradients = dict(zip(NAMES, naive.backward(*arguments, scale=scale), strict=True))
    return Problem(inputs, saved, go, gto, scale, {n: y for n, y in gradients.items() if y is not None})


def candidates(case: str) -> dict[str, list[BackwardConfig]]:
    """Return candidates for each launch of every way to split the gradients."""
    *_, dim, through = CASES[case]
    launches = sorted({of for ways in WAYS[through] for way in ways for of in way})
    loads = [x for x in LOADS if not x[1]] if dim == 80 else LOADS
    return {
        of: [
            BackwardConfig(of, *((own, other) if "q" in of else (other, own)), warps, stages, tma)
            for (own, other, warps), (stages, tma) in itertools.product(NARROW if " " in of else WIDE, loads)
        ]
        for of in launches
    }


def calls_of(case: str) -> list[Call]:
    """Return calls of the candidates of a case on inputs that are cheap but compile to the same kernels."""
    _, h, length, dim, through = CASES[case]
    problem = make((1, h, min(length, 2048), dim, through))
    return [partial(problem.gradients, (launch,)) for found in candidates(case).values() for launch in found]


def library_ms(problem: Problem) -> float:
    """Time the library's flash backward on the same inputs, without tangents."""
    q, k, v = problem.inputs[:3]
    aten: Any = torch.ops.aten
    o, lse, *rest, random, unused, _ = aten._scaled_dot_product_flash_attention(q, k, v, scale=problem.scale)
    given = (problem.go, q, k, v, o, lse, *rest, 0.0, False, random, unused)
    call = partial(aten._scaled_dot_product_flash_attention_backward, *given, scale=problem.scale)
    return time_ms([call] * (1 if q.numel() > 1e7 else 10))["ms"]


def tune(case: str) -> Result:
    """Time all candidates of a case, the best configuration, the table's, and the library."""
    b, h, length, dim, through = CASES[case]
    problem = make(CASES[case])
    rows_ms = time_ms([partial(problem.gradients, ())] * 10)["ms"]
    rows, best = list[Result](), dict[str, tuple[float, BackwardConfig]]()
    for of, launches in candidates(case).items():
        for launch in launches:
            row = problem.row((launch,))
            row |= {"ms": row["ms"] - rows_ms} if "ms" in row else {}
            rows.append(say(case, row))
            best[of] = min(best.get(of, (float("inf"), launch)), (row.get("ms", float("inf")), launch), key=_first)
    ways = [min(ways, key=lambda way: sum(best[of][0] for of in way)) for ways in WAYS[through]]
    table = pick(torch.bfloat16, dim, dim, through, torch.cuda.get_device_capability())
    found: Result = {"rows_ms": rows_ms, "flash_ms": library_ms(problem)}
    for name, config in (("table", table), ("best", tuple(best[of][1] for way in ways for of in way))):
        row = problem.row(config)
        if "ms" in row:
            row["tflops"] = COUNTED[through] * 2.0 * b * h * length**2 * dim / row["ms"] / 1e9
        found[name] = say(f"{case} {name}", row)
    return found | {"launches": fastest_first(rows)}


def _first(pair: tuple[float, BackwardConfig]) -> float:
    return pair[0]


if __name__ == "__main__":
    main(__doc__, "benchmarks.tuning.attention_backward", list(CASES), calls_of, tune)
