"""Host time of a step by the way of calling it: the cost of dispatch, and the part of pytrees in it."""

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import numpy as np
from equinox._compile_utils import hashable_combine, hashable_partition

from benchmarks.cases.step_jax.nnx_ways import NNX_WAYS
from benchmarks.cases.step_jax.ways import WAYS, Running, trained
from benchmarks.cases.step_jax.workload import Workload, busy, tree
from benchmarks.harness.budget import NO_TIME, Budget, say
from fullstride.measure.gate import GateError
from fullstride.measure.timing import Timing
from fullstride.step.jax.trees import memo
from fullstride.step.jax.trees.arguments import read

STEPS = 3
KINDS = ("cpu", "host", "ready")
BLOCK = 10
# Only rounding may differ between programs of one multiplication an array.
TOLERANCE = 1e-5


def difference(arrays: Sequence[Any], reference: Sequence[Any], start: Sequence[Any]) -> float:
    """Return |arrays - reference| / |reference - start| in fp64: the fraction of the training that differs."""
    pairs = [(np.asarray(a, "d") - np.asarray(r, "d")).ravel() for a, r in zip(arrays, reference, strict=True)]
    moved = [(np.asarray(r, "d") - np.asarray(s, "d")).ravel() for r, s in zip(reference, start, strict=True)]
    return float(np.linalg.norm(np.concatenate(pairs)) / np.linalg.norm(np.concatenate(moved)))


def require_alike(
    name: str, arrays: Sequence[Any], reference: Sequence[Any], start: Sequence[Any], tolerance: float
) -> float:
    """Return the difference of a way's parameters after some steps; GateError if it exceeds `tolerance`."""
    error = difference(arrays, reference, start)
    if not error <= tolerance:
        raise GateError(
            f"{name}: after {STEPS} steps {error:.2e} of the training differs from the reference, "
            f"expected at most {tolerance:.2g}; not timed"
        )
    return error


@dataclass(frozen=True)
class Times:
    """Times of one way's calls in milliseconds, with the device idle before each."""

    cpu: Timing  # processor time of the calling thread until the call came back
    host: Timing  # time until it came back
    ready: Timing  # time until the result was there
    gate: float = 0.0  # how much of the training differs from the first way's


def timed(calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, dict[str, list[float]]]:
    """Time every call in milliseconds: blocks of `BLOCK` calls of each way in turn, after one untimed call."""
    samples: dict[str, Any] = {name: {kind: [] for kind in KINDS} for name in calls}
    for _ in range(-(-repeats // BLOCK)):
        for name, call in calls.items():
            jax.block_until_ready(call())
            for _ in range(BLOCK):
                start, cpu = time.perf_counter(), time.thread_time()
                out = call()
                host, cpu = time.perf_counter() - start, time.thread_time() - cpu
                jax.block_until_ready(out)
                for kind, seconds in zip(KINDS, (cpu, host, time.perf_counter() - start), strict=True):
                    samples[name][kind].append(round(seconds * 1e3, 5))
    return samples


@contextmanager
def settled() -> Iterator[None]:
    """Exclude live objects from garbage collection: the trees of one implementation would slow down the others."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def started(
    workload: Workload, names: Sequence[str], budget: Budget | None = None
) -> tuple[dict[str, Running], dict[str, float]]:
    """Return every way after its first call, as time permits, and the milliseconds of compiling and that call."""
    ways, first = {}, {}
    for name in names:
        if ways and budget is not None and budget.spent:
            say(f"left out: {name}: {NO_TIME}")
            continue
        ways[name] = (WAYS | NNX_WAYS)[name](workload)
        start = time.perf_counter()
        jax.block_until_ready(ways[name].call())
        first[name] = (time.perf_counter() - start) * 1e3 + ways[name].compile_ms
        if budget is not None:
            say(f"compiled: {workload.name}, {name}, {first[name] / 1e3:.1f} s")
    return ways, first


def gated(workload: Workload, ways: dict[str, Running], tolerance: float) -> dict[str, float]:
    """Return how much each way's training differs from the first one's after `STEPS` steps."""
    begin = trained(workload.model())
    for running in ways.values():
        for _ in range(STEPS - 1):
            running.call()
    reference = jax.device_get(next(iter(ways.values())).params())
    return {name: require_alike(name, way.params(), reference, begin, tolerance) for name, way in ways.items()}


def host_times(workload: Workload, names: Sequence[str], repeats: int) -> dict[str, Times]:
    """Check, then time, these ways on one workload, in turns in one process."""
    say(f"host: {workload.name}, {len(workload.arrays())} arrays, {len(names)} ways")
    ways, first = started(workload, names)
    gate = gated(workload, ways, TOLERANCE)
    calls = {name: way.call for name, way in ways.items()}
    with settled():
        found = timed(calls, repeats)
    of = lambda name: {kind: Timing(first[name], tuple(found[name][kind]), None) for kind in KINDS}  # noqa: E731
    return {name: Times(**of(name), gate=gate[name]) for name in names}


def ratios(a: Timing, b: Timing) -> Timing:
    """Return a / b call by call within a run, so that drift of the machine cancels."""
    return Timing(0.0, tuple(x / y for x, y in zip(a.samples_ms, b.samples_ms, strict=True)), None)


def parts(workload: Workload, repeats: int) -> dict[str, Timing]:
    """Measure the CPU time of the work on the trees before and after a step, without the step."""
    trees = workload.fresh()
    leaves, treedef = jax.tree.flatten(trees)
    dynamic, static = hashable_partition(trees, eqx.is_array)
    out = eqx.partition(trees, eqx.is_array)
    structure, arrays = (known := read(trees).modules[0][1]).structure, known.leaves
    made = memo.made(structure, arrays)
    record = memo.read(made)
    calls: dict[str, Callable[[], Any]] = {
        "filter_jit, before: hashable_partition": lambda: hashable_partition(trees, eqx.is_array),
        "filter_jit, after: trees out of jax.jit": lambda: jax.tree.unflatten(*reversed(jax.tree.flatten(out[0]))),
        "filter_jit, after: combine": lambda: eqx.combine(*out),
        "patched, after: hashable_combine": lambda: hashable_combine(dynamic, static),
        "jax.jit on modules, before: flatten": lambda: jax.tree.flatten(trees),
        "jax.jit on modules, after: unflatten": lambda: jax.tree.unflatten(treedef, leaves),
        "cached, before: read": lambda: read(trees),
        "cached, after: the model made anew": lambda: memo.made(structure, arrays),
        "cached, after: the model refilled": lambda: memo.refill(record, arrays),
    }

    def alone(call: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            call()

        return run

    found = timed({name: alone(call) for name, call in calls.items()}, repeats)
    return {name: Timing(0.0, tuple(samples["cpu"]), None) for name, samples in found.items()}


def product_ms(count: int = 20) -> float:
    """Return the milliseconds of one of the products that `workload.busy` makes."""
    work = busy(tree("tiny"), count)
    run = jax.jit(lambda batch, key: work.loss_fn(tree("tiny").model(), batch, key))
    jax.block_until_ready(run(work.batch, work.key))
    start = time.perf_counter()
    jax.block_until_ready(run(work.batch, work.key))
    return (time.perf_counter() - start) * 1e3 / count


def slope(leaves: Sequence[int], ms: Sequence[float]) -> tuple[float, float]:
    """Return microseconds per leaf, and milliseconds for none, by least squares."""
    line = statistics.linear_regression(leaves, ms)
    return line.slope * 1e3, line.intercept


def law(leaves: Sequence[int], ms: Sequence[float]) -> dict[str, float]:
    """Fit `ms = a + b n` by least squares of the relative error, over sizes that differ by orders of magnitude.

    Returns:
        b in microseconds, a, and the largest |fit / measured - 1|.

    """
    n, t = np.asarray(leaves, "d"), np.asarray(ms, "d")
    (a, b), *_ = np.linalg.lstsq(np.stack([1 / t, n / t], 1), np.ones_like(t))
    return {"us_per_array": 1e3 * float(b), "ms_at_none": float(a), "worst": float(np.abs((a + b * n) / t - 1).max())}
