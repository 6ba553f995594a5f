"""Tuning of Triton launches on one GPU: compiled ahead, checked against fp64, timed without the host.

A time is the median over replays of a captured graph of several calls, whose inputs are together larger than the cache.
"""

import argparse
import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from benchmarks.harness.environment import environment
from fullstride.measure.timing import Call, CudaClock, TimingPlan, measure

REFUSED = (OutOfResources, PTXASError, CompilationError)
Result = dict[str, Any]


def time_ms(calls: Sequence[Call]) -> dict[str, float]:
    """Return median, tenth and ninetieth percentile of one call, in a captured graph of all of them."""
    calls[0]()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = {call: call() for call in calls}  # results of different calls stay apart
    timing = measure(graph.replay, CudaClock(), TimingPlan(warmup=3, repeats=20, seconds=0.2, most=50))
    del kept
    return {name: timing.quantile(q) / len(calls) for name, q in (("ms", 0.5), ("p10_ms", 0.1), ("p90_ms", 0.9))}


def _compiled(modules: Iterable[ModuleType]) -> dict[Any, Any]:
    """Return every kernel of these modules that is compiled so far."""
    kernels = [x for module in modules for x in vars(module).values() if isinstance(x, triton.JITFunction)]
    caches = [kernel.device_caches[torch.cuda.current_device()][0] for kernel in kernels]
    return {(n, key): value for n, cache in enumerate(caches) for key, value in cache.items()}


def measured(
    name: str, calls: Sequence[Call], error: Callable[[Any], float], allowed: float, modules: Sequence[ModuleType]
) -> Result:
    """Return a candidate's row: error, resources of its kernels, time; or why it was refused.

    `error` is of the first call's result, `allowed` its bound, and the modules are those of its kernels.
    """
    before = _compiled(modules)
    try:
        row: Result = {"name": name, "error": error(calls[0]())}
    except REFUSED as refused:
        return {"name": name, "refused": str(refused).splitlines()[0]}
    for kernel in [value for key, value in _compiled(modules).items() if key not in before]:
        row |= {"registers": kernel.n_regs, "spills": kernel.n_spills, "shared": kernel.metadata.shared}
    return row | (time_ms(calls) if row["error"] <= allowed else {"refused": "wrong"})


def fastest_first(rows: Iterable[Result]) -> list[Result]:
    """Sort rows by time; those without one come last."""
    return sorted(rows, key=lambda row: row.get("ms", float("inf")))


def say(case: str, row: Result) -> Result:
    """Print a row, and return it."""
    sys.stdout.write(f"{case} {json.dumps(row)}\n")
    sys.stdout.flush()
    return row


def main(
    about: str | None,
    module: str,
    cases: Sequence[str],
    calls_of: Callable[[str], list[Call]],
    tune: Callable[[str], Any],
) -> None:
    """Compile the candidates ahead, tune the cases that are asked for, and write all as JSON after each.

    `calls_of` returns calls of a case's candidates on cheap inputs that compile to the same kernels.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--only", default="", help="parts that the names of the cases contain, such as bf16,group_norm")
    parser.add_argument("--jobs", type=int, default=8, help="number of processes that compile")
    parser.add_argument("--share", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    chosen = [case for case in cases if all(part in case for part in given.only.split(","))]
    if given.share is not None:
        for call in [call for case in chosen for call in calls_of(case)][given.share :: given.jobs]:
            with contextlib.suppress(*REFUSED):
                call()
        return
    shares = [[sys.executable, "-m", module, *sys.argv[1:], "--share", str(i)] for i in range(given.jobs)]
    for process in [subprocess.Popen(command) for command in shares]:
        process.wait()
    results = {}
    for case in chosen:
        results[case] = tune(case)
        given.out.write_text(json.dumps({"environment": environment(), "cases": results}, indent=1))
