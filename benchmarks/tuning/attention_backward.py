"""Measures candidates of the backward's table on a GPU: `python -m benchmarks.tuning.attention_backward --json OUT`.

Launches do not depend on one another, so each is measured alone, its gradients checked first against fp64; the best
way to put them together is then the sum that is least, measured once more as a whole. Times are medians of replays of a
captured graph, without the sums over rows that come first (`rows_ms`).
"""

import argparse
import itertools
import json
import platform
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from benchmarks.cases.jvp.shapes import SPEED
from benchmarks.tuning.attention_forward import add_jobs, compile_ahead, compile_share, time_ms
from fullstride.jvp.attention import naive
from fullstride.jvp.attention.backward import backward
from fullstride.jvp.attention.backward_keys import key_gradients
from fullstride.jvp.attention.backward_queries import query_gradients
from fullstride.jvp.attention.backward_table import Config, Launch, pick
from fullstride.jvp.attention.launch_forward import forward

# (batch, heads, length, head dim, whether through the tangent)
CASES = {shape.name: (*shape.q, True) for shape in SPEED}
CASES |= {f"{shape.name}_primal": (*shape.q, False) for shape in SPEED if shape.name != "unet80"}
NAMES = ("dq", "dk", "dv", "dtq", "dtk", "dtv")
# Products that each gradient is counted for: 15 through the tangent, 5 without.
COUNTED = {True: 15, False: 5}
# What a correct candidate in bf16 stays below, relative to the norm of the gradient.
ALLOWED = 0.02
# Blocks of the walker's own rows and of those it walks over, and warps: with two or more accumulators, and with one.
NARROW = [(128, 32, 8), (64, 32, 4), (128, 64, 8)]
WIDE = [(128, 64, 8), (64, 64, 4), (128, 128, 8)]
LOADS = [(2, False), (3, False), (1, True), (2, True)]
KEYS = {
    True: [("dk dtk dv dtv",), ("dk dtk", "dv dtv"), ("dk", "dtk dtv", "dv"), ("dk", "dtk", "dv dtv")],
    False: [("dk dv",), ("dk", "dv")],
}
QUERIES = {True: [("dq dtq",), ("dq", "dtq")], False: [("dq",)]}


@dataclass(frozen=True)
class Problem:
    """Inputs and outputs of one attention, and its gradients in fp64 of the last head."""

    inputs: list[torch.Tensor]
    saved: tuple[Any, ...]
    go: torch.Tensor
    gto: torch.Tensor | None
    scale: float
    expected: dict[str, torch.Tensor]

    def gradients(self, config: Config) -> dict[str, Any]:
        """Those of the configuration's launches; the others are not written."""
        tensors: Any = (self.go, self.gto, *self.inputs, *self.saved)
        return dict(zip(NAMES, backward(*tensors, scale=self.scale, config=config), strict=True))

    def error(self, config: Config) -> float:
        """The largest error of a gradient that the configuration makes, relative to its norm."""
        found = self.gradients(config)
        made = [name for launch in config for name in launch.of.split() if found[name] is not None]
        pairs = [(found[name][-1:, -1:].double(), self.expected[name]) for name in made]
        return max(((x - y).norm() / y.norm()).item() for x, y in pairs)


def make(case: tuple[int, int, int, int, bool]) -> Problem:
    """Random inputs in bf16."""
    b, h, length, dim, through = case
    x = [torch.randn(b, h, length, dim, device="cuda", dtype=torch.bfloat16) for _ in range(8)]
    inputs, go, gto, scale = x[:6], x[6], x[7] if through else None, dim**-0.5
    saved = forward(*inputs, scale=scale)
    exact: Any = [y[-1:, -1:].double() for y in (*inputs, go)]
    outputs: Any = naive.forward(*exact[:6], scale=scale)
    tangent = None if gto is None else gto[-1:, -1:].double()
    arguments: Any = (exact[6], tangent, *exact[:6], *outputs)
    gradients = dict(zip(NAMES, naive.backward(*arguments, scale=scale), strict=True))
    return Problem(inputs, saved, go, gto, scale, {n: y for n, y in gradients.items() if y is not None})


def candidates(of: str, dim: int) -> list[Launch]:
    """Ways to make these gradients."""
    several = len(of.split()) > 1
    cuts = NARROW if several else WIDE
    loads = [x for x in LOADS if not x[1]] if dim == 80 else LOADS
    queries = "q" in of
    return [
        Launch(of, *((own, other) if queries else (other, own)), warps, stages, tma)
        for (own, other, warps), (stages, tma) in itertools.product(cuts, loads)
    ]


def compiled() -> dict[Any, Any]:
    """Every kernel compiled so far."""
    kernels: tuple[Any, ...] = (query_gradients, key_gradients)
    caches = [kernel.device_caches[torch.cuda.current_device()][0] for kernel in kernels]
    return {(n, key): value for n, cache in enumerate(caches) for key, value in cache.items()}


def run(problem: Problem, config: Config) -> dict[str, Any]:
    """A configuration's row."""
    before, name = compiled(), " + ".join(map(str, config))
    try:
        row: dict[str, Any] = {"name": name, "error": problem.error(config)}
    except (OutOfResources, PTXASError, CompilationError) as refused:
        return {"name": name, "refused": str(refused).splitlines()[0]}
    for kernel in [value for key, value in compiled().items() if key not in before]:
        row |= {"registers": kernel.n_regs, "spills": kernel.n_spills, "shared": kernel.metadata.shared}
    if not row["error"] <= ALLOWED:
        return row | {"refused": "wrong"}
    return row | time_ms(lambda: problem.gradients(config), 1 if problem.go.numel() > 1e7 else 10)


def ways_of(through: bool) -> tuple[Any, Any]:
    """How the gradients of queries and those of keys may be parted among launches."""
    return QUERIES[through], KEYS[through]


def launches_of(parts: tuple[Any, Any]) -> list[str]:
    """Each launch of any of these ways, once."""
    return sorted({of for ways in parts for way in ways for of in way})


def calls_of(case: str) -> list[Any]:
    """The candidates of a case, on inputs that cost next to nothing but are compiled for alike."""
    _, h, length, dim, through = CASES[case]
    problem = make((1, h, min(length, 2048), dim, through))
    found = [launch for of in launches_of(ways_of(through)) for launch in candidates(of, dim)]
    return [partial(problem.gradients, (launch,)) for launch in found]


def best_launches(case: str, problem: Problem, rows_ms: float, rows: list[dict[str, Any]]) -> Config:
    """Measures the launches of every way to part the gradients, and returns those whose sum is least."""
    best: dict[str, tuple[float, Launch]] = {}
    parts = ways_of(CASES[case][4])
    for of in launches_of(parts):
        for launch in candidates(of, CASES[case][3]):
            row = run(problem, (launch,))
            row |= {"ms": row["ms"] - rows_ms} if "ms" in row else {}
            rows.append(row)
            sys.stdout.write(f"{case} {json.dumps(row)}\n")
            sys.stdout.flush()
            best[of] = min(
                best.get(of, (float("inf"), launch)), (row.get("ms", float("inf")), launch), key=lambda x: x[0]
            )
    chosen = [min(ways, key=lambda way: sum(best[of][0] for of in way)) for ways in parts]
    return tuple(best[of][1] for way in chosen for of in way)


def library_ms(problem: Problem) -> float:
    """The library's flash backward of the same inputs, without tangents."""
    q, k, v = problem.inputs[:3]
    aten: Any = torch.ops.aten
    o, lse, *rest, random, unused, _ = aten._scaled_dot_product_flash_attention(q, k, v, scale=problem.scale)
    given = (problem.go, q, k, v, o, lse, *rest, 0.0, False, random, unused)
    call = aten._scaled_dot_product_flash_attention_backward
    return time_ms(lambda: call(*given, scale=problem.scale), 1 if q.numel() > 1e7 else 10)["ms"]


def tune(case: str) -> dict[str, Any]:
    """All candidates of a case, the best configuration, the table's, and the library's time."""
    b, h, length, dim, through = CASES[case]
    problem = make(CASES[case])
    rows_ms = time_ms(lambda: problem.gradients(()), 10)["ms"]
    rows: list[dict[str, Any]] = []
    table = pick(torch.bfloat16, dim, dim, through, torch.cuda.get_device_capability())
    found: dict[str, Any] = {"rows_ms": rows_ms, "flash_ms": library_ms(problem)}
    for name, config in (("table", table), ("best", best_launches(case, problem, rows_ms, rows))):
        row = run(problem, config)
        if "ms" in row:
            row["tflops"] = COUNTED[through] * 2.0 * b * h * length**2 * dim / row["ms"] / 1e9
        found[name] = row
        sys.stdout.write(f"  {case} {name} {json.dumps(row)}\n")
    return found | {"launches": sorted(rows, key=lambda row: row.get("ms", float("inf")))}


def main() -> None:
    """Run the cases named, print the best of each, write all as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", action="append", choices=list(CASES), help="may be repeated; all without it")
    parser.add_argument("--json", type=Path, required=True)
    add_jobs(parser)
    arguments = parser.parse_args()
    cases = arguments.case or list(CASES)
    if arguments.share is not None:
        return compile_share([call for case in cases for call in calls_of(case)], arguments.share, arguments.jobs)
    compile_ahead("benchmarks.tuning.attention_backward", arguments.jobs)
    machine = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    results = {}
    for case in cases:
        results[case] = tune(case)
        text = json.dumps({"machine": machine | {"python": platform.python_version()}, "cases": results}, indent=1)
        arguments.json.write_text(text)
    return None


if __name__ == "__main__":
    main()
