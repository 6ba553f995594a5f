"""`fullstride bench llm`: this engine beside transformers and the floor of what must be read."""

import json
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fullstride.bench.environment import environment, xla_flags
from fullstride.bench.floor import Ceilings, Floor, floor
from fullstride.bench.gate import GateError
from fullstride.bench.results import CaseResult, Row, at
from fullstride.bench.session import say
from fullstride.bench.timing import Timing
from fullstride.errors import ConfigError, one_of
from fullstride.extras import how_to_install
from fullstride.llm.bench_gate import gate
from fullstride.llm.bench_latency import run_latency
from fullstride.llm.bench_parallel import run_parallel
from fullstride.llm.bench_shared import complete, kept_as, name_of, shown
from fullstride.llm.bench_sweep import run_sweep, weight_count
from fullstride.llm.bench_trace import traced
from fullstride.llm.bench_work import ATTENTION, ATTENTIONS, TEMPERATURE, Work, large, model, small
from fullstride.llm.engine import Engine, EngineConfig
from fullstride.llm.engine.parts import chosen
from fullstride.llm.engine.sizes import DEFAULTS, dtype_for
from fullstride.step.jax.bench_ceilings import jax_ceilings


def _run_replicas(*arguments: Any) -> Path:
    """Of a server, whose packages no other workload needs."""
    from fullstride.llm.bench_replicas import run_replicas

    return run_replicas(*arguments)


def _run_serve(*arguments: Any) -> Path:
    """Likewise."""
    from fullstride.llm.bench_serve import run_serve

    return run_serve(*arguments)


# What can run with a pool of another dtype than the model's, and what cannot.
WITH_POOL = ("small", "large", "sweep")
SPECIAL = {"latency": run_latency, "parallel": run_parallel, "replicas": _run_replicas, "serve": _run_serve}
WORKLOADS = (*WITH_POOL, *SPECIAL)
# Which workloads have a setting, and what it is unless given.
OF = {"runs": ("small", "large"), "sequences": ("large",), "baseline": ("small",), "baseline-attention": ("small",)}
RUNS, SEQUENCES = 10, 256


def run(
    *,
    source: str,
    workload: str,
    runs: int | None = None,
    sequences: int | None = None,
    baseline: bool | None = None,
    baseline_attention: str | None = None,
    dtype: str | None,
    out: Path,
    kernels: str = "auto",
    kv_cache_dtype: str = "auto",
) -> Path:
    """Measure, print the table, write the JSON.

    Args:
        source: a model's name, file or folder; or one of `bench_work.SHAPES`, that shape with random weights.
        workload: `small` is 4 prompts of 100 tokens each, `large` nano-vllm's, `sweep` decode steps,
            `latency` starts and first tokens, `parallel` and `replicas` what more devices bring, `serve` what clients
            of the HTTP server get.
        runs: timed, after a first one, of `small` and `large`; 10 unless given.
        sequences: of `large`; 256 unless given.
        baseline: also time transformers' `generate`, in a process of its own; of `small`, which does unless told.
        baseline_attention: of transformers, one of `bench_work.ATTENTIONS`; PyTorch's own unless given.
        dtype: of the weights.
        out: the folder of results.
        kernels: see `EngineConfig`.
        kv_cache_dtype: see `EngineConfig`; for `small`, `large` and `sweep`.

    Returns:
        The file written.

    Raises:
        ConfigError: for a model or workload that there is not, a setting that the workload does not have, or kernels
            that cannot run the model here.
        GateError: if fp32 greedy tokens are not those of the baseline, or see `bench_gate.gate`.

    """
    one_of("--workload", workload, WORKLOADS)
    if kv_cache_dtype != "auto" and workload not in WITH_POOL:
        which = ", ".join(WITH_POOL)
        raise ConfigError(f"kv_cache_dtype={kv_cache_dtype} with --workload {workload}: expected one of {which}")
    given = {"runs": runs, "sequences": sequences, "baseline": baseline, "baseline-attention": baseline_attention}
    for setting, value in given.items():
        if value is not None and workload not in OF[setting]:
            raise ConfigError(f"--{setting} with --workload {workload}: only {' and '.join(OF[setting])} has it")
    attention = baseline_attention or ATTENTION
    one_of("--baseline-attention", attention, ATTENTIONS)
    if baseline is False and baseline_attention:
        raise ConfigError(f"--baseline-attention {attention} with --no-baseline: nothing would run it; leave one out")
    runs, sequences = runs or RUNS, sequences or SEQUENCES
    device = jax.devices()[0]
    place = "cpu" if device.platform == "cpu" else "cuda"
    asked = EngineConfig(dtype=dtype, kernels=kernels, kv_cache_dtype=kv_cache_dtype)
    loaded = model(source, dtype_for(asked, device.platform, "") or None)
    chosen(loaded.config, asked)  # what cannot run is told before anything is timed
    if workload == "sweep":
        return run_sweep(loaded, source, place, dtype, kernels, out, kv_cache_dtype)
    if workload in SPECIAL:
        return SPECIAL[workload](loaded, source, place, dtype, kernels, out)
    vocab = loaded.config.vocab_size
    work = small(vocab) if workload == "small" else large(vocab, sequences)
    # First, since a GPU that JAX has taken holds nothing else.
    beside = workload == "small" and baseline is not False
    theirs = _baseline(source, loaded.config.dtype, place, runs, attention) if beside else {}
    # As large as the workload, as the baseline's tensors are: an engine for longer ones has tables to match.
    most = DEFAULTS["cpu" if place == "cpu" else "other"].rows
    count = min(len(work.prompts), most)
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
    found = _gate(engine, work, theirs) | gate(engine, loaded.parameters, [*map(len, work.prompts)], count)
    rows = [_row("fullstride", _timed(engine, work, runs), work, least)]
    if workload == "small" and (trace := traced(lambda: complete(engine, work, TEMPERATURE))) is not None:
        rows[0].extra["gpu"] = trace.to_dict()
        say(f"the GPU was idle for {trace.idle:.0%} of a run under the profiler")
    rows += [_row(name, theirs[name], work, least) for name in theirs if name.startswith("transformers")]
    machine = environment()
    machine["versions"] |= theirs.get("versions", {})
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
            **{"no-baseline": (baseline is False, False), "baseline-attention": (attention, ATTENTION)},
        ),
        **({"baseline_attention": theirs["attention"]} if "attention" in theirs else {}),
        **({"left_out": theirs["left_out"]} if "left_out" in theirs else {}),
    }
    result = CaseResult("llm", place, conditions, found, ceilings, rows, machine)
    return shown(result, out)


def _baseline(source: str, dtype: str, place: str, runs: int, attention: str) -> dict[str, Any]:
    if lacking := [name for name in ("torch", "transformers") if find_spec(name) is None]:
        names = " and ".join(lacking)
        remedy = f"{how_to_install('torch')} transformers, or take --no-baseline"
        say(f"left out: transformers, for want of {names}; {remedy}")
        return {"left_out": f"transformers: without {names}"}
    say("transformers, in a process of its own")
    done = _run_baseline(source, dtype, place, str(runs), attention)
    if done.returncode:
        say(f"left out: transformers, whose process ended with {done.returncode}; nothing stands beside the engine")
        return {"left_out": f"transformers: exit code {done.returncode}"}
    return json.loads(done.stdout)


def _run_baseline(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fullstride.llm.bench_transformers", *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True)


def _gate(engine: Engine, work: Work, theirs: dict[str, Any]) -> dict[str, float]:
    """How many of 20 greedy tokens differ; in fp32 none may, and of other dtypes `bench_gate.gate` judges them."""
    if "greedy" not in theirs:
        return {}
    (ours,) = complete(engine, Work(work.prompts[-1:], [20]), 0.0)
    wrong = sum(a != b for a, b in zip(ours, theirs["greedy"], strict=True))
    if wrong and engine.sizes.dtype == "float32":
        raise GateError(f"{wrong} of 20 greedy tokens are not those of transformers; not timed")
    return {"greedy tokens that differ, of 20": float(wrong)}


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
