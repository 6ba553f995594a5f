"""`fullstride bench llm --workload parallel|replicas`: what more devices bring, for one model or for copies of it."""

import gc
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from fullstride.bench.floor import Ceilings, Floor
from fullstride.bench.gate import GateError
from fullstride.bench.results import CaseResult, Row
from fullstride.bench.session import say
from fullstride.bench.timing import Timing
from fullstride.llm.bench_shared import ceilings_of, complete, environment_of, name_of, shown
from fullstride.llm.bench_sweep import fits, step_samples, weight_count
from fullstride.llm.bench_work import TEMPERATURE, Work, small
from fullstride.llm.config import ModelConfig
from fullstride.llm.engine import Engine, EngineConfig
from fullstride.llm.engine.programs import TOP
from fullstride.llm.kernels import AXIS
from fullstride.llm.models.shares import mesh_of, refusal
from fullstride.llm.sampling_params import SamplingParams

# Devices, rows and contexts of the decode steps; sequences at once, and the longest of them.
COUNTS = (1, 2, 4, 8)
POINTS = {"cpu": ((1, 64), (4, 64)), "cuda": ((1, 400), (4, 400), (16, 400), (16, 900))}
SEQUENCES, LONGEST = 16, 1024
# Sums over the devices that follow one another in a measurement, and measurements.
SUMS, REPEATS = 64, 9
GREEDY = 20


def settings(config: ModelConfig, dtype: str | None, kernels: str, count: int = 1) -> EngineConfig:
    """Of an engine for few sequences, which has few programs."""
    longest = min(LONGEST, config.max_position)
    return EngineConfig(
        dtype=dtype,
        prefix_cache=False,
        max_length=longest,
        max_sequences=SEQUENCES,
        max_tokens_per_step=8 * SEQUENCES,
        kv_blocks=SEQUENCES * -(-longest // 16),
        kernels=kernels,
        tensor_parallel_size=count,
    )


def counts(config: ModelConfig) -> list[int]:
    """Numbers of devices that there are, and that can share the model."""
    return [n for n in COUNTS if n <= jax.device_count() and refusal(config, n) is None]


def sum_ms(engine: Engine, rows: int) -> float:
    """Milliseconds of one sum over an engine's devices of what a layer leaves of so many rows; 0 for one device."""
    if len(engine.devices) == 1:
        return 0.0
    mesh = mesh_of(engine.devices)

    def chain(x):
        for _ in range(SUMS):
            x = lax.psum(x, AXIS) * 0.5
        return x

    whole = PartitionSpec()
    call = jax.jit(jax.shard_map(chain, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False))
    zeros = jnp.zeros((rows, engine.model.hidden_size), engine.sizes.dtype)
    x = jax.device_put(zeros, NamedSharding(mesh, whole))
    samples = []
    for _ in range(REPEATS + 1):
        started = time.perf_counter()
        call(x).block_until_ready()
        samples.append((time.perf_counter() - started) * 1e3 / SUMS)
    return float(np.median(samples[1:]))


def floor_of(engine: Engine, rows: int, context: int, ceilings: Ceilings, one_sum: float) -> Floor:
    """A device's share of the bytes at the copy rate and, one after the other, two sums a layer and the embedding's."""
    pool, count = engine._runner.state.pool, len(engine.devices)
    weights = weight_count(engine.model)
    moved = (weights * pool.dtype.itemsize + rows * context * (pool.nbytes // pool.shape[2])) / count
    sums = (2 * engine.model.layers + 1) * one_sum
    return Floor(2 * rows * weights / count / ceilings.flops * 1e3, moved / ceilings.bytes * 1e3 + sums)


def steps(engine: Engine, place: str, ceilings: Ceilings) -> Iterator[Row]:
    """Decode steps, a row for each number of sequences and context."""
    runner, count = engine._runner, len(engine.devices)
    for rows, context in POINTS[place]:
        if not fits(runner, rows, context):
            continue
        one_sum = sum_ms(engine, rows)
        first, *samples = step_samples(runner, rows, context)
        timing = Timing(first, tuple(samples), None)
        extra = {
            "devices": count,
            "batch": rows,
            "context": context,
            "kernels": engine.kernels,
            "all_reduce_us": one_sum * 1e3,
            "tokens_per_second": rows / timing.median_ms * 1e3,
        }
        least = floor_of(engine, rows, context, ceilings, one_sum)
        say(f"{_named(count)}, {rows} rows of {context}: {timing.median_ms:.3f} ms, a sum {one_sum * 1e3:.1f} us")
        yield Row(f"{_named(count)}, batch {rows}, context {context}", timing, least, extra)


def agreeing(ours: list[list[int]], theirs: list[list[int]]) -> int:
    """Tokens before the first that differs, in all."""
    found = 0
    for a, b in zip(ours, theirs, strict=True):
        found += next((i for i, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1]), len(a))
    return found


def first_logprobs(engine: Engine, work: Work) -> list[dict[int, float]]:
    """The most probable first tokens of each answer, before any choice could differ."""
    for i, prompt in enumerate(work.prompts):
        engine.add(str(i), prompt, SamplingParams(temperature=0.0, max_tokens=1, logprobs=TOP, ignore_eos=True))
    found: list[dict[int, float]] = [{} for _ in work.prompts]
    while engine.busy:
        for delta in engine.step():
            if delta.error:
                raise RuntimeError(delta.error)
            (places,) = delta.logprobs or ((),)
            found[int(delta.request_id)] = {place.token: place.logprob for place in places}
    return found


def largest_difference(ours: list[dict[int, float]], theirs: list[dict[int, float]]) -> float:
    """Of the logprobs of tokens that are among the most probable ones of both."""
    pairs = [(a[token], b[token]) for a, b in zip(ours, theirs, strict=True) for token in a.keys() & b.keys()]
    return max(abs(a - b) for a, b in pairs)


def with_speed_ups(rows: list[Row]) -> list[Row]:
    """How many times as many tokens a second as with the fewest devices."""
    base: dict[tuple[int, int], float] = {}
    for row in rows:
        speed = row.extra["tokens_per_second"]
        row.extra["speed_up"] = speed / base.setdefault((row.extra["batch"], row.extra["context"]), speed)
        say(f"{row.name}: {row.timing.median_ms:.3f} ms, {row.extra['speed_up']:.2f} x ({row.extra['kernels']})")
    return rows


def run_parallel(loaded: Any, source: str, place: str, dtype: str | None, kernels: str, out: Path) -> Path:
    """Time decode steps of one model on 1, 2, 4 and 8 devices, as far as there are so many; see `bench.run`.

    Raises:
        GateError: if greedy tokens in fp32 are not those of one device.

    """
    work = small(loaded.config.vocab_size)
    work = Work(work.prompts, [GREEDY] * len(work.prompts))
    rows: list[Row] = []
    gate: dict[str, float] = {}
    expected, beside, ceilings, precision = None, None, None, ""
    for count in counts(loaded.config):
        started = time.perf_counter()
        engine = Engine(loaded, settings(loaded.config, dtype, kernels, count))
        precision = engine.sizes.dtype
        say(f"{_named(count)}: ready after {time.perf_counter() - started:.0f} s")
        found = complete(engine, work, 0.0)
        expected = expected or found
        wrong = work.tokens - agreeing(found, expected)
        if wrong and precision == "float32":
            raise GateError(f"{wrong} of {work.tokens} greedy tokens of {count} devices are not one's; not timed")
        logprobs = first_logprobs(engine, work)
        beside = beside or logprobs
        gate[f"greedy tokens from the first on that differs, of {work.tokens}, {_named(count)}"] = float(wrong)
        gate[f"largest difference of first tokens' logprobs, {_named(count)}"] = largest_difference(logprobs, beside)
        ceilings = ceilings or ceilings_of(place, precision)
        rows += steps(engine, place, ceilings)
        del engine
        gc.collect()
    assert ceilings is not None
    conditions = _conditions(source, precision, "parallel", rows)
    return shown(CaseResult("llm", place, conditions, gate, ceilings, with_speed_ups(rows), environment_of(place)), out)


def run_replicas(loaded: Any, source: str, place: str, dtype: str | None, kernels: str, out: Path) -> Path:
    """Time engines that each have a device and a thread and never meet but for Python's lock; see `bench.run`."""
    work = Work([list(range(3, 3 + 20))] * SEQUENCES, [100] * SEQUENCES)
    config = settings(loaded.config, dtype, kernels)
    engines: list[Engine] = []
    rows: list[Row] = []
    ceilings = None
    for count in [n for n in COUNTS if n <= jax.device_count()]:
        while len(engines) < count:
            engines.append(Engine(loaded, config, devices=[jax.devices()[len(engines)]]))
        ceilings = ceilings or ceilings_of(place, engines[0].sizes.dtype)
        first, *samples = _together(engines, work)
        timing = Timing(first, tuple(samples), None)
        least = floor_of(engines[0], SEQUENCES, len(work.prompts[0]) + work.outputs[0] // 2, ceilings, 0.0)
        whole = Floor(least.arithmetic_ms * work.outputs[0], least.memory_ms * work.outputs[0])
        extra = {
            "devices": count,
            "batch": SEQUENCES,
            "context": 0,
            "kernels": engines[0].kernels,
            "tokens_per_second": count * work.tokens / timing.median_ms * 1e3,
        }
        rows.append(Row(f"{_named(count)}, an engine each, {SEQUENCES} sequences each", timing, whole, extra))
    assert ceilings is not None
    conditions = _conditions(source, engines[0].sizes.dtype, "replicas", with_speed_ups(rows))
    return shown(CaseResult("llm", place, conditions, {}, ceilings, rows, environment_of(place)), out)


def _together(engines: list[Engine], work: Work) -> Iterator[float]:
    """Milliseconds until all engines have done the same work at the same time."""
    with ThreadPoolExecutor(len(engines)) as pool:
        for _ in range(REPEATS + 1):
            started = time.perf_counter()
            for done in [pool.submit(complete, engine, work, TEMPERATURE) for engine in engines]:
                done.result()
            yield (time.perf_counter() - started) * 1e3


def _named(count: int) -> str:
    return f"{count} device{'s' * (count > 1)}"


def _conditions(source: str, precision: str, section: str, rows: list[Row]) -> dict[str, Any]:
    return {
        "model": name_of(source),
        "precision": precision,
        "section": section,
        "kernels": "+".join(dict.fromkeys(row.extra["kernels"] for row in rows)),
        "devices": [*dict.fromkeys(row.extra["devices"] for row in rows)],
        "temperature": TEMPERATURE,
        "max_length": LONGEST,
        "max_sequences": SEQUENCES,
    }
