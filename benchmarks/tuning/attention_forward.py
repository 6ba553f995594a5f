"""Measures candidates of the forward's table on one GPU: `python -m benchmarks.tuning.attention_forward --json OUT`.

Each candidate is checked first, rows drawn at random against fp64; its time is the median of replays of a captured
graph of several calls, so that no host time is in it. Inputs are larger than the L2 cache.
"""

import argparse
import contextlib
import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import triton
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from benchmarks.cases.jvp.shapes import TUNING
from fullstride.jvp.attention.forward_kernel import dual_forward
from fullstride.jvp.attention.forward_table import Config, SpecialisedConfig
from fullstride.jvp.attention.hopper_kernel import dual_forward_hopper
from fullstride.jvp.attention.launch_forward import forward
from fullstride.measure.timing import CudaClock, Plan, measure

# (batch, heads, length, head dim)
CASES = {name: shape.q for name, shape in TUNING.items()}
# What a correct candidate in bf16 stays below, relative to the largest value of the reference.
ALLOWED = 0.03


def specialised(dim: int) -> list[SpecialisedConfig]:
    """Candidates of the warp-specialised kernel."""
    cuts = {64: [(64, 2), (64, 3), (64, 4), (128, 2)], 128: [(64, 2), (32, 3), (32, 4)]}.get(dim, [])
    return [SpecialisedConfig(n, stages, turns) for n, stages in cuts for turns in (False, True)]


def tiled(dim: int) -> list[Config]:
    """Candidates of the Triton kernels."""
    cuts = {
        64: [(128, 64, 8), (128, 128, 8), (64, 64, 4), (64, 128, 4), (64, 32, 4), (128, 32, 8)],
        80: [(64, 64, 4), (128, 64, 8), (64, 32, 4), (128, 32, 8), (64, 128, 8), (128, 128, 8)],
        128: [(128, 64, 8), (128, 32, 8), (64, 64, 4), (64, 32, 4), (64, 64, 8)],
    }[dim]
    tma = [False] if dim == 80 else [True, False]
    return [Config(m, n, w, stages, tma=t) for m, n, w in cuts for stages in (1, 2, 3) for t in tma]


def make(case: tuple[int, int, int, int]) -> list[torch.Tensor]:
    """q, k, v and their tangents."""
    b, h, length, dim = case
    return [torch.randn(b, h, length, dim, device="cuda", dtype=torch.bfloat16) for _ in range(6)]


def reference(inputs: list[torch.Tensor], rows: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """o and to of some rows of the last head, in fp64."""
    q, k, v, tq, tk, tv = (x[-1, -1].double() for x in inputs)
    p = torch.softmax(scale * q[rows] @ k.mT, -1)
    ts = scale * (tq[rows] @ k.mT + q[rows] @ tk.mT)
    return p @ v, (p * (ts - (p * ts).sum(-1, keepdim=True))) @ v + p @ tv


def error(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...], rows: torch.Tensor) -> float:
    """The largest error over the largest value, of o and of to."""
    pairs = zip(found, expected, strict=True)
    return max(((x[-1, -1, rows].double() - y).abs().max() / y.abs().max()).item() for x, y in pairs)


def compiled() -> dict[Any, Any]:
    """Every kernel compiled so far."""
    kernels: tuple[Any, ...] = (dual_forward, dual_forward_hopper)
    caches = [kernel.device_caches[torch.cuda.current_device()][0] for kernel in kernels]
    return {(n, key): value for n, cache in enumerate(caches) for key, value in cache.items()}


def time_ms(call: Any, calls: int) -> dict[str, float]:
    """Median, tenth and ninetieth percentile of a call in a captured graph of `calls`."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    timing = measure(graph.replay, CudaClock(), Plan(warmup=3, repeats=20, seconds=0.2, most=50))
    return {name: timing.quantile(q) / calls for name, q in (("ms", 0.5), ("p10_ms", 0.1), ("p90_ms", 0.9))}


def run(name: str, call: Any, expected: Any, rows: torch.Tensor, flop: float) -> dict[str, Any]:
    """One candidate's row; `call` returns o and to."""
    before = compiled()
    try:
        row: dict[str, Any] = {"name": name, "error": error(call(), expected, rows)}
    except (OutOfResources, PTXASError, CompilationError) as refused:
        return {"name": name, "refused": str(refused).splitlines()[0]}
    for kernel in [value for key, value in compiled().items() if key not in before]:
        row |= {"registers": kernel.n_regs, "spills": kernel.n_spills, "shared": kernel.metadata.shared}
    if row["error"] > ALLOWED:
        return row | {"refused": "wrong"}
    row |= time_ms(call, 1 if flop > 1e12 else 10)
    return row | {"tflops": flop / row["ms"] / 1e9}


def candidates(inputs: list[torch.Tensor], scale: float) -> list[tuple[str, Any]]:
    """Names and calls."""
    dim = inputs[0].shape[3]
    return [
        (str(config), lambda c=config: forward(*inputs, scale=scale, config=c)[:2])
        for config in (*specialised(dim), *tiled(dim))
    ]


def tune(case: str) -> list[dict[str, Any]]:
    """All candidates of a case, fastest first."""
    inputs = make(CASES[case])
    b, h, length, dim = CASES[case]
    scale = dim**-0.5
    rows = torch.randint(0, length, (64,), device="cuda")
    expected = reference(inputs, rows, scale)
    found = []
    for name, call in candidates(inputs, scale):
        row = run(name, call, expected, rows, 12.0 * b * h * length**2 * dim)
        found.append(row)
        sys.stdout.write(f"{case} {json.dumps(row)}\n")
        sys.stdout.flush()
    return sorted(found, key=lambda row: row.get("ms", float("inf")))


def calls_of(case: str) -> list[tuple[str, Any]]:
    """The candidates of a case, on inputs that cost next to nothing but are compiled for alike."""
    _, h, length, dim = CASES[case]
    return candidates(make((1, h, min(length, 2048), dim)), dim**-0.5)


def compile_share(calls: list[Any], share: int, jobs: int) -> None:
    """Make every jobs-th call, so that its kernels lie compiled on the disk."""
    for call in calls[share::jobs]:
        with contextlib.suppress(OutOfResources, PTXASError, CompilationError):
            call()


def compile_ahead(module: str, jobs: int) -> None:
    """Compile all candidates by as many processes."""
    shares = [[sys.executable, "-m", module, *sys.argv[1:], "--share", str(i)] for i in range(jobs)]
    for process in [subprocess.Popen(command) for command in shares]:
        process.wait()


def add_jobs(parser: argparse.ArgumentParser) -> None:
    """The options of `compile_ahead`."""
    parser.add_argument("--jobs", type=int, default=8, help="processes that compile")
    parser.add_argument("--share", type=int, help=argparse.SUPPRESS)


def main() -> None:
    """Run the cases named, print the best of each, write all as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", action="append", choices=list(CASES), help="may be repeated; all without it")
    parser.add_argument("--json", type=Path, required=True)
    add_jobs(parser)
    arguments = parser.parse_args()
    cases = arguments.case or list(CASES)
    if arguments.share is not None:
        return compile_share([call for case in cases for _, call in calls_of(case)], arguments.share, arguments.jobs)
    compile_ahead("benchmarks.tuning.attention_forward", arguments.jobs)
    results = {}
    for case in cases:
        results[case] = tune(case)
        for row in results[case][:5]:
            sys.stdout.write(
                f"  {case:8} {row.get('ms', 0):8.4f} ms {row.get('tflops', 0):6.1f} TFLOP/s {row['name']}\n"
            )
        machine = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
        text = json.dumps({"machine": machine | {"python": platform.python_version()}, "cases": results}, indent=1)
        arguments.json.write_text(text)
    return None


if __name__ == "__main__":
    main()
