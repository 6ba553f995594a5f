"""`python -m benchmarks paged-attention`: attention of decode steps compared with a gather and the roofline bound.

A program calls it many times in a row, on one layer after the other, so that neither launches nor cached keys
hide the cost. The CUDA kernel also runs in a chain, as in a decode step. With `--dtype fp8` kernels that read such a KV
cache also have a rounded copy of it, and their rows the relative error that this makes.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from rich.table import Table

from benchmarks.cases.llm import attention_work as pallas
from benchmarks.cases.llm.attention_fp8 import from_fp8, to_fp8
from benchmarks.cases.llm.attention_work import PagedAttentionCase, Way, chained, draw, expected, gather, slots
from benchmarks.cases.llm.options import BATCHES, BLOCK, AttentionOptions
from benchmarks.cases.llm.shared import WIDTH
from benchmarks.cases.step_jax.ceilings import jax_ceilings
from benchmarks.harness.budget import reason, say
from benchmarks.harness.environment import environment
from benchmarks.harness.results import CaseResult, Row, at
from benchmarks.harness.table import finish, result_table
from fullstride.errors import ConfigError
from fullstride.llm.config import ModelConfig
from fullstride.llm.kernels import choose
from fullstride.llm.kernels.cuda.attention import attention
from fullstride.llm.kernels.cuda.target import HOPPER, LEAST_SHARED, SHARED, Target, capability_of, target_of
from fullstride.llm.kernels.fp8_pool import SCALE_BYTES
from fullstride.llm.kernels.interface import AttentionShape, QKNorm
from fullstride.measure.roofline import roofline_bound
from fullstride.measure.timing import HostClock, Timing, TimingPlan, measure

# Relative error of rows against fp64, by the pool's dtype.
TOLERANCE = {"bfloat16": 1e-2, "float32": 1e-5}
# By platform: layers of the pool, milliseconds that a program should take.
LAYERS, PROGRAM_MS = {"cpu": 2, "cuda": 8}, {"cpu": 0.0, "cuda": 10.0}
# A Hopper GPU with the instructions and the shared memory of other GPUs.
TARGETS = {
    "hopper": HOPPER,
    "a100": Target(HOPPER.capability, "80", clusters=False, shared=SHARED[80]),
    "l4": Target(HOPPER.capability, "80", clusters=False, shared=LEAST_SHARED),
    "rtx50": Target(HOPPER.capability, "90", clusters=True, shared=LEAST_SHARED),
}
PLAN, GLANCE = (
    TimingPlan(warmup=2, repeats=10, seconds=0.2, most=50),
    TimingPlan(warmup=1, repeats=3, seconds=0.0, most=3),
)


def run(options: AttentionOptions, out: Path) -> Path:
    """Check, measure, print the table and write the JSON; return its path.

    ConfigError if the set or a target cannot run here. GateError if a result is not that of fp64; the others are
    measured and written before.
    """
    dtype = "bfloat16" if options.dtype == "fp8" else options.dtype
    kernels, seed, contexts = options.kernels, options.seed, options.contexts
    heads, dim = options.heads, options.head_dim
    shape = AttentionShape(heads, options.kv_heads, dim, options.block, dim**-0.5, 1e-6)
    device = jax.devices()[0]
    place = "cpu" if device.platform == "cpu" else "cuda"
    model = ModelConfig("qwen3", 1, 1, 1, 1, shape.heads, shape.kv_heads, shape.head_dim, contexts[1])
    chosen = choose(kernels, model, dtype, shape.block, device)
    ways = {chosen.name: Way(chosen.attention, keep=chosen.name == "plain")}
    on_hopper = chosen.name == "paged" and target_of(capability_of(device)) is HOPPER
    if options.target and not on_hopper:
        given = f"--target {options.target[0]} with the kernels {chosen.name} on {device.device_kind}"
        raise ConfigError(f"{given}: expected the kernels paged on a GPU of compute capability 9.0")
    if on_hopper:
        ways["in a chain"] = Way(chained, whole=True)
    if options.dtype == "fp8":
        copied = {
            "fp8": True,
            "inside": partial(to_fp8, block=shape.block),
            "outside": partial(from_fp8, block=shape.block),
        }
        ways |= {f"{name}, fp8": way._replace(**copied) for name, way in ways.items()}
    if on_hopper:
        targets = options.target or ("l4",)
        ways |= {f"as for {name}": Way(partial(attention, target=TARGETS[name])) for name in targets}
    if options.beside:
        ways["gather"] = Way(gather, keep=True)
        if place == "cuda" and pallas.present():
            ways |= pallas.ways(shape)
    rng, ceilings = np.random.default_rng(seed), jax_ceilings(dtype)
    size = LAYERS[place], 2, slots(shape, max(options.batch), contexts[1]), shape.kv_heads, shape.head_dim
    # A layer at a time, since random numbers take more room than what is made of them.
    keys = jax.random.split(jax.random.key(seed), size[0])
    pool = jax.jit(lambda keys: lax.map(lambda key: jax.random.normal(key, size[1:], dtype), keys))(keys)
    norms = QKNorm(*(jnp.asarray(rng.uniform(0.5, 1.5, shape.head_dim), dtype) for _ in range(2)))
    rows, gate, wrong, left_out = [], {}, [], []
    for count in options.batch:
        case = draw(rng, shape, count, *contexts, dtype)
        tokens, width = int(case.contexts.sum()), shape.head_dim
        for name, way in ways.items():
            say(f"{name}, batch {count}")
            each = width + SCALE_BYTES if way.fp8 else width * np.dtype(dtype).itemsize
            least = roofline_bound(4 * tokens * shape.heads * width, 2 * tokens * shape.kv_heads * each, ceilings)
            way = way._replace(call=partial(way.call, norms=norms, shape=shape))
            try:
                error, rounding, pool = _gate(way, case, pool, norms, shape)
                gate[name] = max(gate.get(name, 0.0), error)
                if not error <= TOLERANCE[dtype]:
                    wrong.append(f"{name}, batch {count}: relative error {error:.2e} against fp64, not timed")
                    continue
                timing, calls, pool = _timed(way, case, pool, shape, PROGRAM_MS[place])
            except Exception as broken:
                if not way.another:
                    raise
                left_out.append(f"batch {count}: {name}: {reason(broken)}")
                say(f"left out: {left_out[-1]}")
                continue
            extra: dict[str, Any] = {"tokens": tokens, "calls": calls}
            extra["share_of_copy_rate"] = least.memory_ms / timing.median_ms
            if rounding is not None:
                extra["relative_error"] = rounding
            rows.append(Row(f"batch {count}: {name}", timing, least, extra))
    name = f"{shape.heads}-{shape.kv_heads}-heads-of-{shape.head_dim}"
    conditions = {
        "model": name,
        "precision": options.dtype,
        "section": f"contexts-{contexts[0]}-{contexts[1]}",
        "block": shape.block,
        "layers": pool.shape[0],
        "seed": seed,
        **({} if kernels == "auto" else {"kernels": chosen.name}),
        **({"left_out": left_out} if left_out else {}),
        **at(
            batch=(options.batch, BATCHES),
            block=(shape.block, BLOCK),
            seed=(seed, 0),
            target=(options.target, ()),
            **{"no-gather": (not options.beside, False)},
        ),
    }
    result = CaseResult("paged-attention", place, conditions, gate, ceilings, rows, environment())

    def shown() -> Iterator[Table | str]:
        yield result_table(result)
        for row in rows:
            share, own = row.extra["share_of_copy_rate"], row.extra.get("relative_error")
            told = f", relative error {own:.2e} of the rounding" if own is not None else ""
            yield f"{row.name}: {row.timing.median_ms * 1e3:.1f} us, {share:.0%} of the copy rate{told}"

    if wrong:
        wrong[-1] += f"; expected at most {TOLERANCE[dtype]:.2g}"
    return finish(result, out, shown, width=WIDTH, wrong=wrong)


def _gate(
    way: Way, case: PagedAttentionCase, pool: jax.Array, norms: QKNorm, shape: AttentionShape
) -> tuple[float, float | None, jax.Array]:
    """Return the relative error of the first and last rows on the last layer, and the KV cache.

    With an fp8 KV cache also the error from keys and values as they were before they were rounded.
    """
    layer, rows = pool.shape[0] - 1, sorted({0, len(case.contexts) - 1})
    # A set that writes elsewhere would leave the pool as it was: the row's own token must be in it.
    where = () if way.whole else (way.layer(layer),)
    step = jax.jit(lambda qkv, pool, batch: way.call(qkv, pool, *where, batch), donate_argnums=1)
    out, own = step(case.qkv, way.inside(pool), case.batch)
    after = way.outside(own)
    ours = np.asarray(out, np.float64)[rows]

    def error(pool: jax.Array) -> float:
        reference = expected(case, pool, layer, norms, shape, rows)
        return float(np.linalg.norm(ours - reference) / np.linalg.norm(reference))

    # Another kernel has written this step's keys and values into the original of a copy.
    return (error(after), error(pool), pool) if way.fp8 else (error(after), None, after)


def _timed(
    way: Way, case: PagedAttentionCase, pool: jax.Array, shape: AttentionShape, wanted_ms: float
) -> tuple[Timing, int, jax.Array]:
    """Time one call; also return the number of calls in a program, which is chosen to take about `wanted_ms`."""
    layers, held = pool.shape[0], [way.inside(pool)]
    kept = pool if way.fp8 else None

    def timing_of(times: int, plan: TimingPlan) -> Timing:
        program = _program(way, case, layers, shape, times)

        def timed() -> None:
            pool, out = program(held.pop())
            out.block_until_ready()
            held.append(pool)

        return measure(timed, HostClock(), plan)

    times = max(1, round(wanted_ms / timing_of(1, GLANCE).median_ms))
    timing = timing_of(times, PLAN)
    each = tuple(sample / (times * layers) for sample in timing.samples_ms)
    return Timing(timing.first_ms, each, None), times * layers, way.outside(held[0]) if kept is None else kept


def _program(way: Way, case: PagedAttentionCase, layers: int, shape: AttentionShape, times: int) -> Callable[..., Any]:
    """Compile a program that runs all layers `times` times."""

    def layer_by_layer(_, carry):
        pool, out = carry
        if way.whole:
            return way.call(case.qkv, pool, case.batch)[::-1]
        for layer in range(layers):
            new, pool = way.call(case.qkv, pool, way.layer(layer), case.batch)
            out = out + new if way.keep else new
        return pool, out

    blank = jnp.zeros((case.qkv.shape[0], shape.heads * shape.head_dim), case.qkv.dtype)
    return jax.jit(lambda pool: lax.fori_loop(0, times, layer_by_layer, (pool, blank)), donate_argnums=0)
