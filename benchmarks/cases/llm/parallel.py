"""`python -m benchmarks llm --workload parallel`: tensor parallelism of one model on several devices."""

import gc
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.cases.llm.devices import REPEATS, SEQUENCES, Report, counts, named, on_devices, settings
from benchmarks.cases.llm.gate import gate
from benchmarks.cases.llm.shared import LlmBench, complete, run_all, timing_of
from benchmarks.cases.llm.sweep import fits, step_samples, token_bytes, weight_bytes, weight_count
from benchmarks.cases.llm.work import ModelWork, small
from benchmarks.cases.step_jax.ceilings import jax_ceilings
from benchmarks.harness.budget import say
from benchmarks.harness.results import Row
from fullstride.llm.config import ModelConfig
from fullstride.llm.engine import Engine
from fullstride.llm.engine.programs import TOP
from fullstride.llm.engine.shapes import dtype_for
from fullstride.llm.kernels import choose
from fullstride.llm.kernels.interface import AXIS
from fullstride.llm.models.tensor_parallel import mesh_of
from fullstride.llm.sampling_params import SamplingParams
from fullstride.measure.gate import GateError
from fullstride.measure.roofline import Ceilings, RooflineBound
from fullstride.measure.timing import HostClock

# Rows and contexts of the decode steps.
POINTS = {"cpu": ((1, 64), (4, 64)), "cuda": ((1, 400), (4, 400), (16, 400), (16, 900))}
# Sums over the devices that follow one another in a measurement.
SUMS = 64
GREEDY = 20


def cases(config: ModelConfig, dtype: str, kernels: str) -> list[tuple[int, str]]:
    """Return numbers of devices with kernel names; one device also runs the kernels of several, if they differ."""
    block, device = settings(config, dtype, kernels).block_size, jax.devices()[0]
    found = [(n, choose(kernels, config, dtype, block, device, n).name) for n in counts(config)]
    return list(dict.fromkeys([found[0], *((1, name) for _, name in found), *found]))


def sum_ms(engine: Engine, rows: int) -> float:
    """Return the milliseconds of one all-reduce of a layer's output for some rows; 0 for one device."""
    if len(engine.devices) == 1:
        return 0.0
    mesh, own = mesh_of(engine.devices), engine._runner.programs.kernels.all_reduce

    def chain(x):
        for _ in range(SUMS):
            x = (lax.psum(x, AXIS) if own is None else own(x)) * 0.5
        return x

    whole = PartitionSpec()
    call = jax.jit(jax.shard_map(chain, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False))
    zeros = jnp.zeros((rows, engine.model.hidden_size), engine.sizes.dtype)
    x = jax.device_put(zeros, NamedSharding(mesh, whole))
    samples = [HostClock().time(lambda: call(x).block_until_ready()) for _ in range(REPEATS + 1)]
    return timing_of(samples).median_ms / SUMS


def floor_of(engine: Engine, rows: int, context: int, ceilings: Ceilings, one_sum: float) -> RooflineBound:
    """Return the bound of one device: its bytes at the copy rate, two all-reduces per layer and the embedding's."""
    count = len(engine.devices)
    moved = (weight_bytes(engine) + rows * context * token_bytes(engine)) / count
    sums = (2 * engine.model.layers + 1) * one_sum
    return RooflineBound(
        2 * rows * weight_count(engine.model) / count / ceilings.flops * 1e3, moved / ceilings.bytes * 1e3 + sums
    )


def steps(engine: Engine, place: str, ceilings: Ceilings) -> Iterator[Row]:
    """Time decode steps: a row for each number of sequences and context."""
    runner, count = engine._runner, len(engine.devices)
    for rows, context in POINTS[place]:
        if not fits(runner, rows, context):
            continue
        one_sum = sum_ms(engine, rows)
        timing = timing_of(step_samples(runner, rows, context))
        extra = {
            "devices": count,
            "batch": rows,
            "context": context,
            "kernels": engine.kernels,
            "all_reduce_us": one_sum * 1e3,
            "tokens_per_second": rows / timing.median_ms * 1e3,
        }
        least = floor_of(engine, rows, context, ceilings, one_sum)
        yield Row(f"{named(count)}, {engine.kernels}, batch {rows}, context {context}", timing, least, extra)


def agreeing(ours: list[list[int]], theirs: list[list[int]]) -> int:
    """Return the total number of tokens before the first difference of each answer."""
    found = 0
    for a, b in zip(ours, theirs, strict=True):
        found += next((i for i, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1]), len(a))
    return found


def first_logprobs(engine: Engine, work: ModelWork) -> list[dict[int, float]]:
    """Return the most probable first tokens of each answer, before any choice could differ."""
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=TOP, ignore_eos=True)
    found = run_all(engine, work.prompts, [params] * len(work.prompts))
    return [{place.token: place.logprob for place in (own[-1].logprobs or ((),))[0]} for own in found]


def largest_difference(ours: list[dict[int, float]], theirs: list[dict[int, float]]) -> float:
    """Return the largest difference between logprobs of tokens that are among the most probable of both."""
    pairs = [(a[token], b[token]) for a, b in zip(ours, theirs, strict=True) for token in a.keys() & b.keys()]
    return max(abs(a - b) for a, b in pairs)


def run(bench: LlmBench) -> Path:
    """Time decode steps of one model on 1, 2, 4 and 8 devices, as far as there are so many; see `case.run`.

    ConfigError if the kernels that were named cannot run on one of these numbers of devices. GateError if greedy tokens
    in fp32 are not those of one device; or see `bench_gate.gate`.
    """
    loaded = on_devices(bench.loaded)
    platform = jax.devices()[0].platform
    precision = dtype_for(settings(loaded.config, bench.dtype, bench.kernels), platform, loaded.config.dtype)
    chosen = cases(loaded.config, precision, bench.kernels)
    ceilings = jax_ceilings(precision, "read")
    report = Report(bench, precision, "parallel", [name for _, name in chosen], ceilings)
    work = small(loaded.config.vocab_size)
    agreement = Agreement(report, work)
    for count, name in chosen:
        started = time.perf_counter()
        engine = Engine(loaded, settings(loaded.config, bench.dtype, name, tensor_parallel_size=count))
        ready = time.perf_counter() - started
        called = f"{named(count)}, {name}"
        say(f"{called}: ready after {ready:.1f} s")
        report.extra.setdefault("ready_seconds", {})[called] = ready
        agreement.check(engine, called)
        report.gate |= gate(engine, loaded.parameters, [*map(len, work.prompts)], SEQUENCES, called)
        for row in steps(engine, bench.place, ceilings):
            report.add(row)
        del engine
        gc.collect()
    return report.shown()


class Agreement:
    """Comparison of each engine's tokens and logprobs with those of the first engine."""

    def __init__(self, report: Report, work: ModelWork):
        self._report, self._work = report, ModelWork(work.prompts, [GREEDY] * len(work.prompts))
        self._first: tuple[list[list[int]], list[dict[int, float]]] | None = None

    def check(self, engine: Engine, name: str) -> None:
        """Note how many tokens and by how much logprobs differ; GateError if a token does in fp32."""
        found = complete(engine, self._work, 0.0), first_logprobs(engine, self._work)
        self._first = self._first or found
        total = self._work.tokens
        wrong = total - agreeing(found[0], self._first[0])
        if wrong and engine.sizes.dtype == "float32":
            raise GateError(f"{wrong} of {total} greedy tokens of {name} differ from those of one device; not timed")
        self._report.gate |= {
            f"greedy tokens from the first on that differs, of {total}, {name}": float(wrong),
            f"largest difference of first tokens' logprobs, {name}": largest_difference(found[1], self._first[1]),
        }
