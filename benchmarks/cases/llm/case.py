"""`python -m benchmarks llm`: this engine beside transformers, vLLM and the floor of what must be read."""

import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.cases.llm.beside import Peers, interpreter
from benchmarks.cases.llm.gate import gate
from benchmarks.cases.llm.latency import run_latency
from benchmarks.cases.llm.options import ATTENTION, RUNS, SEQUENCES, Options
from benchmarks.cases.llm.parallel import run_parallel
from benchmarks.cases.llm.shared import complete, kept_as, name_of, shown
from benchmarks.cases.llm.sweep import run_sweep, weight_count
from benchmarks.cases.llm.trace import traced
from benchmarks.cases.llm.work import TEMPERATURE, Work, compared, large, model, small
from benchmarks.cases.step_jax.ceilings import jax_ceilings
from benchmarks.harness.budget import say
from benchmarks.harness.environment import environment, xla_flags
from benchmarks.harness.results import CaseResult, Row, at
from fullstride.llm.engine import Engine, EngineConfig
from fullstride.llm.engine.build import chosen
from fullstride.llm.engine.shapes import DEFAULTS, dtype_for
from fullstride.measure.gate import GateError
from fullstride.measure.roofline import Ceilings, Floor, floor
from fullstride.measure.timing import Timing


def _of_server(name: str) -> Callable[..., Path]:
    """A workload of a server, whose packages no other needs: imported when it runs."""

    def run(*arguments: Any) -> Path:
        return getattr(import_module(f"benchmarks.cases.llm.{name}"), f"run_{name}")(*arguments)

    return run


# Workloads but for `small` and `large`.
OTHERS: dict[str, Callable[..., Path]] = {
    "latency": run_latency,
    "parallel": run_parallel,
    **{name: _of_server(name) for name in ("replicas", "serve", "hostile")},
}


def run(options: Options, out: Path) -> Path:
    """Measure, print the table, write the JSON, whose path is returned.

    Raises:
        ConfigError: for a model that there is not, a vLLM that does not run, or kernels that cannot run the model here.
        GateError: if fp32 greedy tokens are not those of what runs beside it, or see `bench_gate.gate`.

    """
    source, workload, dtype = options.model, options.workload, options.dtype
    kernels, kv_cache_dtype = options.kernels, options.kv_cache_dtype
    vllm = None if options.vllm is None else interpreter(options.vllm)
    runs, sequences = options.runs or RUNS, options.sequences or SEQUENCES
    attention, baseline = options.attention, options.baseline
    device = jax.devices()[0]
    place = "cpu" if device.platform == "cpu" else "cuda"
    asked = EngineConfig(dtype=dtype, kernels=kernels, kv_cache_dtype=kv_cache_dtype)
    loaded = model(source, dtype_for(asked, device.platform, "") or None)
    chosen(loaded.config, asked)  # what cannot run is told before anything is timed
    if workload == "sweep":
        return run_sweep(loaded, source, place, dtype, kernels, out, kv_cache_dtype)
    if workload in OTHERS:
        return OTHERS[workload](loaded, source, place, dtype, kernels, out)
    vocab = loaded.config.vocab_size
    work = small(vocab) if workload == "small" else large(vocab, sequences)
    most = DEFAULTS["cpu" if place == "cpu" else "other"].rows
    count = min(len(work.prompts), most)
    # First, since a GPU that JAX has taken holds nothing else.
    peers = Peers()
    if vllm is not None:
        peers.add_vllm(vllm, source, loaded.config.dtype, runs, work, count)
    if workload == "small" and baseline is not False:
        peers.add_transformers(source, loaded.config.dtype, place, runs, attention)
    # As large as the workload, as the others' tensors are: an engine for longer ones has tables to match.
    settings = EngineConfig(
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        prefix_cache=False,
        max_length=work.longest,
        max_sequences=count,
        kernels=kernels,
    )
    engine = Engine(loaded, settings)
    ceilings = jax_ceilings(engine.sizes.dtype, "read")
    least = _floor(engine, work, ceilings)
    found = _gate(engine, work, peers.greedy) | gate(engine, loaded.parameters, [*map(len, work.prompts)], count)
    rows = [_row("fullstride", _timed(engine, work, runs), work, least)]
    if workload == "small" and (trace := traced(lambda: complete(engine, work, TEMPERATURE))) is not None:
        rows[0].extra["gpu"] = trace.to_dict()
        say(f"the GPU was idle for {trace.idle:.0%} of a run under the profiler")
    rows += [_row(name, samples, work, least) for name, samples in peers.times.items()]
    machine = environment()
    machine["versions"] |= peers.versions
    conditions = {
        "model": name_of(source),
        "precision": engine.sizes.dtype,
        **kept_as(settings),
        "section": workload,
        "kernels": engine.kernels,
        "prompts": len(work.prompts),
        "tokens": work.tokens,
        "runs": runs,
        "temperature": TEMPERATURE,
        "max_length": work.longest,
        "max_sequences": count,
        **at(
            sequences=(sequences, SEQUENCES),
            xla=(xla_flags(), ""),
            beside=(vllm and "vllm", None),
            **{"no-baseline": (baseline is False, False), "baseline-attention": (attention, ATTENTION)},
        ),
        **peers.conditions,
    }
    result = CaseResult("llm", place, conditions, found, ceilings, rows, machine)
    return shown(result, out)


def _gate(engine: Engine, work: Work, theirs: dict[str, list[int]]) -> dict[str, float]:
    """How many greedy tokens differ; in fp32 none may, and of other dtypes `bench_gate.gate` judges them."""
    if not theirs:
        return {}
    (ours,) = complete(engine, compared(work), 0.0)
    wrong = {whose: sum(a != b for a, b in zip(ours, tokens, strict=True)) for whose, tokens in theirs.items()}
    for whose, count in wrong.items():
        if count and engine.sizes.dtype == "float32":
            raise GateError(f"{count} of {len(ours)} greedy tokens are not those of {whose}; not timed")
    return {f"greedy tokens that differ from {whose}, of {len(ours)}": float(n) for whose, n in wrong.items()}


def _timed(engine: Engine, work: Work, runs: int) -> list[float]:
    samples = []
    for _ in range(runs + 1):
        started = time.perf_counter()
        complete(engine, work, TEMPERATURE)
        samples.append((time.perf_counter() - started) * 1e3)
    return samples


def _row(name: str, samples: list[float], work: Work, least: Floor) -> Row:
    timing = Timing(samples[0], tuple(samples[1:]), None)
    return Row(name, timing, least, {"tokens_per_second": work.tokens / timing.median_ms * 1e3})


def _floor(engine: Engine, work: Work, ceilings: Ceilings) -> Floor:
    pool = engine._runner.state.pool
    active, kv = weight_count(engine.model), pool.nbytes // pool.shape[2]
    weights = active * np.dtype(engine.sizes.dtype).itemsize
    everything = work.tokens + sum(map(len, work.prompts))
    return floor(2 * active * everything, work.floor_bytes(weights, kv), ceilings)
