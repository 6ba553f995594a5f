"""Real step of BERT by the way of calling it, compared with the bare executable."""

import random
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax

from benchmarks.cases.step_jax.host import gated, settled, started
from benchmarks.cases.step_jax.ways import BARE, Running
from benchmarks.cases.step_jax.workload import Workload
from benchmarks.cases.step_jax.xla_trace import kernels_of
from benchmarks.harness.budget import Budget, say
from benchmarks.harness.environment import slug
from benchmarks.harness.kernel_groups import Profile, summary
from fullstride.measure.pairs import median_interval
from fullstride.measure.timing import Timing

COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \([^\n]*\{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
OPERATION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = \S+ ([\w\-]+)\(", re.MULTILINE)
CALLED = re.compile(r"calls=%?([\w.\-]+)")
# Threefry, JAX's generator, is rotations and exclusive ors; few other computations have as many.
ROUNDS = 10
# The bare executable first: all others are compared with it.
NAMES = (
    BARE,
    "flat list",
    "TrainStep",
    "TrainStep grouped",
    "make_train_step",
    "..._with_partition",
    "cached_filter_jit donated",
    "hoisted partition",
    "filter_jit donated",
    "filter_jit + Optimizer",
    "filter_jit",
)
# Steps of one way in a row: a loop waits for the newest of them alone.
BLOCK = 5
# Steps of a trace.
TRACED = 10
# Adam turns what rounding leaves of a gradient that is zero, such as a key's bias, into whole steps.
TOLERANCE = {"fp32": 5e-2, "bf16": 0.25}


def fused(hlo: str) -> dict[str, int]:
    """Count a program's fused computations, those that draw random bits, and those that also apply dropout.

    Returns:
        `fusions`; `random`, which draw bits by XLA's generator or JAX's; `random_and_select`, which select in the
        same computation, too; `operations_of_largest_random`; `exponential`, such as a softmax's;
        `exponential_and_select`, which mask in the same computation; `exponential_and_random`, which drop in it.

    """
    bodies = dict(COMPUTATION.findall(hlo))
    operations = [OPERATION.findall(bodies[name]) for name in set(CALLED.findall(hlo)) & bodies.keys()]
    random = [ops for ops in operations if _draws(ops)]
    exponential = [ops for ops in operations if "exponential" in ops]
    return {
        "fusions": len(operations),
        "random": len(random),
        "random_and_select": sum("select" in ops for ops in random),
        "operations_of_largest_random": max(map(len, random), default=0),
        "exponential": len(exponential),
        "exponential_and_select": sum("select" in ops for ops in exponential),
        "exponential_and_random": sum(map(_draws, exponential)),
    }


def _draws(operations: list[str]) -> bool:
    return "rng-bit-generator" in operations or operations.count("xor") >= ROUNDS


@dataclass(frozen=True)
class StepTimes:
    """Times of one way's steps in milliseconds."""

    blocked: Timing  # each step waited for
    # Processor time of all threads until then: on a CPU all of a step's work, whatever else the machine does.
    cpu: Timing
    free: Timing  # steps of a loop that waits at its end, each a mean of `BLOCK`
    rounds: tuple[float, ...]  # median of `blocked` in each round
    cpu_rounds: tuple[float, ...]  # median of `cpu` in each round
    gate: float  # how much of the training differs from the bare executable's
    notes: dict[str, Any]  # what XLA says of the program, where it is known


def over(times: Sequence[float], bare: Sequence[float]) -> dict[str, Any]:
    """Return the median of the ratios round by round, with its spread and 95 % interval."""
    found = Timing(0.0, tuple(a / b for a, b in zip(times, bare, strict=True)), None)
    interval = median_interval(found.samples_ms)
    spread = {"p10": found.quantile(0.1), "p90": found.quantile(0.9)}
    return {"ratio": found.median_ms, **spread, "interval": interval and list(interval)}


def verdict(found: Sequence[dict[str, Any]], limit: float) -> str:
    """Return `yes` or `no` if all intervals of the ratios are on one side of `limit`, else `open`."""
    intervals = [f["interval"] or [0.0, float("inf")] for f in found]
    if all(high <= limit for _, high in intervals):
        return "yes"
    return "no" if any(low > limit for low, _ in intervals) else "open"


def step_times(
    workload: Workload,
    names: Sequence[str],
    precision: str,
    budget: Budget,
    least: int = 10,
    profile: Path | None = None,
) -> Any:
    """Check, then time, these ways in turns on one workload, for at least some rounds, until the time is up.

    A trace of each way goes to a separate folder below `profile`, and its kernels to the notes.
    """
    ways, first = started(workload, names, budget)
    gate = gated(workload, ways, TOLERANCE[precision])
    say(f"timing: {workload.name}")
    visits: dict[str, list[Visit]] = {name: [] for name in ways}
    # In a new order each round: a device that a slow way has left idle is cooler, and runs the next one faster.
    draw = random.Random(0)
    with settled():
        while len(visits[BARE]) < least or (not budget.spent and len(visits[BARE]) < 6 * least):
            for name in draw.sample(list(ways), len(ways)):
                visits[name].append(_visit(ways[name]))
    notes = {name: _notes(way.executable) for name, way in ways.items()}
    if profile is not None:
        for name, way in ways.items():
            notes[name]["profile"] = traced(way, profile / slug(name))
    return {name: _times(visits[name], first[name], gate[name], notes[name]) for name in ways}


def traced(way: Running, folder: Path) -> Profile:
    """Trace some steps of a way, as a loop makes them, each marked with its number; return the kernels' summary."""
    with jax.profiler.trace(str(folder)):
        out = None
        for number in range(TRACED):
            with jax.profiler.StepTraceAnnotation("train", step_num=number):
                out = way.call()
        jax.block_until_ready(out)
    say(f"traced: {folder}")
    return summary(kernels_of(folder, TRACED))


class Visit(NamedTuple):
    """Turn of one way: blocking steps, their CPU time, and the time per step in a loop."""

    blocked: list[float]
    cpu: list[float]
    free: float


def _times(visits: list[Visit], first: float, gate: float, notes: dict[str, Any]) -> StepTimes:
    return StepTimes(
        blocked=Timing(first, tuple(x for v in visits for x in v.blocked), None),
        cpu=Timing(first, tuple(x for v in visits for x in v.cpu), None),
        free=Timing(first, tuple(v.free for v in visits), None),
        rounds=tuple(statistics.median(v.blocked) for v in visits),
        cpu_rounds=tuple(statistics.median(v.cpu) for v in visits),
        gate=gate,
        notes=notes,
    )


def _visit(way: Running) -> Visit:
    jax.block_until_ready(way.call())
    times, cpu = [], []
    for _ in range(BLOCK):
        start, used = time.perf_counter(), time.process_time()
        jax.block_until_ready(way.call())
        cpu.append((time.process_time() - used) * 1e3)
        times.append((time.perf_counter() - start) * 1e3)
    start, out = time.perf_counter(), None
    for _ in range(BLOCK):
        out = way.call()
    jax.block_until_ready(out)
    return Visit(times, cpu, (time.perf_counter() - start) * 1e3 / BLOCK)


def _notes(executable: Any) -> dict[str, Any]:
    if executable is None:
        return {}
    cost, memory = executable.cost_analysis() or {}, executable.memory_analysis()
    sizes = {"temporary_bytes": memory.temp_size_in_bytes, "argument_bytes": memory.argument_size_in_bytes}
    return {"xla_flops": cost.get("flops"), **sizes, "fusions": fused(executable.as_text())}
