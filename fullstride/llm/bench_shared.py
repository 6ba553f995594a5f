"""What the engine's benches share: ceilings of this machine, its name, and how a result is shown."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console

from fullstride.bench.environment import environment
from fullstride.bench.floor import COPY_BYTES, GEMM_SIZE, Ceilings
from fullstride.bench.results import CaseResult, write_result
from fullstride.bench.table import result_table
from fullstride.bench.timing import HostClock, Plan, measure
from fullstride.llm.bench_work import Work
from fullstride.llm.engine import Engine, EngineConfig
from fullstride.llm.sampling_params import SamplingParams

WIDTH = 120  # columns that the table needs


def shown(result: CaseResult, out: Path) -> Path:
    """Print a result, line by line in tokens a second where it has them, and write it."""
    console = Console(width=max(Console().width, WIDTH))
    console.print(result_table(result))
    for row in result.rows:
        if "tokens_per_second" in row.extra:
            speed, share = row.extra["tokens_per_second"], 1 / row.over_floor
            console.print(f"{row.name}: {speed:.1f} tokens/s, {share:.0%} of the bound", highlight=False)
    return write_result(result, out)


def name_of(source: str) -> str:
    """Of a model, from its file or folder."""
    path = Path(source)
    return path.stem if path.is_file() else path.name


def kept_as(settings: EngineConfig) -> dict[str, str]:
    """What a result says of its pool, if that is not the weights' dtype."""
    return {} if settings.kv_cache_dtype == "auto" else {"kv_cache_dtype": settings.kv_cache_dtype}


def environment_of(place: str) -> dict[str, Any]:
    """Where a result is from, with the GPU as JAX sees it."""
    found = environment()
    if place == "cuda":
        device = jax.devices()[0]
        found["gpu"] = {"name": device.device_kind, "memory_bytes": device.memory_stats()["bytes_limit"]}
    return found


def ceilings_of(place: str, dtype: str) -> Ceilings:
    """Rates as `fullstride.bench.floor.measure_ceilings` has them, by JAX; bytes are those of the fastest reading."""
    clock, plan = HostClock(), Plan(warmup=3, repeats=10, seconds=0.3)
    n, size = GEMM_SIZE[place], COPY_BYTES[place]
    a = jax.random.normal(jax.random.key(0), (n, n), dtype)
    product, read = jax.jit(lambda a: a @ a), jax.jit(lambda w, x: w @ x)
    gemm = measure(lambda: product(a).block_until_ready(), clock, plan)
    # What a decode step of one row does: a matrix is read once; XLA's copies on a CPU are slower than that.
    w, x = jnp.ones((size // 4096, 1024), jnp.float32), jnp.ones(1024)
    moved = measure(lambda: read(w, x).block_until_ready(), clock, plan)
    rates = 2 * n**3 / gemm.median_ms * 1e3, size / min(moved.samples_ms) * 1e3
    return Ceilings(*rates, f"{n}^3 {dtype}", size, list(gemm.samples_ms), list(moved.samples_ms))


def complete(engine: Engine, work: Work, temperature: float) -> list[list[int]]:
    """Run the work on an idle engine; the tokens of each answer."""
    for i, (prompt, count) in enumerate(zip(work.prompts, work.outputs, strict=True)):
        engine.add(str(i), prompt, SamplingParams(temperature=temperature, max_tokens=count, ignore_eos=True))
    tokens: list[list[int]] = [[] for _ in work.prompts]
    while engine.busy:
        for delta in engine.step():
            tokens[int(delta.request_id)] += delta.token_ids
            if delta.error:
                raise RuntimeError(delta.error)
    return tokens
