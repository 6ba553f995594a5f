"""Cost of decode steps by batch and context: the engine's own programs compared with the roofline bound."""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.cases.llm.gate import gate
from benchmarks.cases.llm.shared import LlmBench, shown, timing_of
from benchmarks.cases.llm.work import TEMPERATURE
from benchmarks.cases.step_jax.ceilings import jax_ceilings
from benchmarks.harness.environment import xla_flags
from benchmarks.harness.results import Row, at, write_result
from fullstride.llm.config import ModelConfig, parameter_shapes
from fullstride.llm.engine import Engine, wire
from fullstride.llm.engine.runner import Runner
from fullstride.llm.engine.wire import DecodeInput
from fullstride.measure.roofline import Ceilings, roofline_bound

GRIDS = {"cpu": ((1, 4), (128, 512)), "cuda": ((1, 2, 4, 8, 16, 32, 64, 128, 256), (128, 400, 1024, 4096, 8192))}
# Dispatches that follow one another without being waited for, and how often that is timed.
BURSTS, REPEATS = 4, 7


def weight_count(config: ModelConfig) -> int:
    """Return the number of weights that a step reads; an untied embedding is looked up, not read whole."""
    shapes = parameter_shapes(config)
    return sum(int(np.prod(shape)) for name, shape in shapes.items() if config.tied or name != "embed")


def weight_bytes(engine: Engine) -> int:
    """Return the bytes of the weights that a step reads."""
    if engine.quantize == "none":
        return weight_count(engine.model) * np.dtype(engine.sizes.dtype).itemsize
    weights = jax.tree.unflatten(engine._runner._tree, engine._runner._leaves)
    read = weights if engine.model.tied else weights._replace(embed=None)
    return sum(leaf.nbytes for leaf in jax.tree.leaves(read))


def token_bytes(engine: Engine) -> int:
    """Return the bytes of a token's keys and values, and of their scales in an fp8 KV cache."""
    return engine._runner.state.pool.nbytes // ((engine.sizes.blocks + 1) * engine.sizes.block)


def prompt_operations(config: ModelConfig, tokens: int) -> int:
    """Return the operations of a prompt's matrix products; logits are computed at its last position only."""
    head = int(np.prod(parameter_shapes(config)["embed"]))
    return 2 * ((weight_count(config) - head) * tokens + head)


def sweep(engine: Engine, place: str, ceilings: Ceilings) -> Iterator[tuple[list[Row], list[str]]]:
    """Yield the rows so far and the sizes left out, at first and after each batch and context.

    The KV cache and the rows of the idle engine are overwritten.
    """
    runner, config = engine._runner, engine.model
    count, kv = weight_count(config), token_bytes(engine)
    batches, contexts = GRIDS[place]
    grid = {f"batch {batch}, context {context}": (batch, context) for context in contexts for batch in batches}
    rows: list[Row] = []
    left_out = list(grid)
    yield rows, left_out
    for name, (batch, context) in grid.items():
        if not fits(runner, batch, context):
            continue
        timing = timing_of(step_samples(runner, batch, context))
        least = roofline_bound(2 * batch * count, weight_bytes(engine) + batch * context * kv, ceilings)
        speed = batch / timing.median_ms * 1e3
        rows.append(Row(name, timing, least, {"batch": batch, "context": context, "tokens_per_second": speed}))
        left_out.remove(name)
        yield rows, left_out


def _blocks(runner: Runner, context: int) -> int:
    return -(-(context + BURSTS * runner.sizes.steps + 1) // runner.sizes.block)


def fits(runner: Runner, batch: int, context: int) -> bool:
    """Return whether rows, block tables and KV cache have room for `batch` sequences of `context` tokens."""
    sizes, blocks = runner.sizes, _blocks(runner, context)
    everything = batch * blocks * len(sizes.windows)
    return batch <= sizes.rows and blocks <= sizes.widths[-1] and everything <= sizes.blocks


def step_samples(runner: Runner, batch: int, context: int) -> Iterator[float]:
    """Return milliseconds of steps, the first of which is a warm-up."""
    sizes, blocks = runner.sizes, _blocks(runner, context)
    rows = next(size for size in sizes.row_buckets if size >= batch)
    width = next(size for size in sizes.widths if size >= blocks)
    groups = len(sizes.windows)
    packed = np.zeros(DecodeInput.size(rows, groups * width), np.int32)
    host = DecodeInput.of(packed, rows)
    host.head[:], host.slots[:] = (sizes.steps, 0), sizes.rows
    host.slots[:batch], host.capacity[:batch] = np.arange(batch), blocks * sizes.block
    # Blocks of a sequence lie apart, as they do after a while.
    order = np.random.default_rng(0).permutation(sizes.blocks)[: batch * groups * blocks] + 1
    host.tables.reshape(rows, groups, width)[:batch, :, :blocks] = order.reshape(batch, groups, blocks)
    for _ in range(REPEATS + 1):
        _stand(runner, context)
        started = time.perf_counter()
        outs = [runner.run(("decode", rows, 0, width), packed, True) for _ in range(BURSTS)]
        jax.block_until_ready(outs)
        yield (time.perf_counter() - started) * 1e3 / (BURSTS * sizes.steps)


def _stand(runner: Runner, context: int) -> None:
    """Put every row in the middle of an answer with a context of that length."""
    count = runner.state.last.shape[0]
    words = np.zeros((count, wire.PARAMS.size), np.int32)
    numbers, keys = wire.words(TEMPERATURE, 1.0, 0.0, 1.0, 0.0, 0.0), np.arange(2 * count).reshape(count, 2)
    wire.PARAMS.put(words, limit=runner.sizes.max_length + 1, key=keys, numbers=numbers, stops=-1)
    standing = {
        "last": jnp.arange(count, dtype=jnp.int32),
        "length": jnp.full(count, context, jnp.int32),
        "alive": jnp.ones(count, bool),
        "params": jnp.asarray(words),
    }
    places = runner.places()._asdict()
    runner.state = runner.state._replace(**{name: jax.device_put(x, places[name]) for name, x in standing.items()})
    jax.block_until_ready(runner.state)


def run(bench: LlmBench) -> Path:
    """Time decode steps and write every row as it is found; see `case.run`."""
    batches, contexts = GRIDS[bench.place]
    longest = min(bench.loaded.config.max_position, max(contexts) + 128)
    engine = bench.engine(prefix_cache=False, max_length=longest, max_sequences=max(batches))
    off = gate(engine, bench.numbers(engine), contexts, engine.sizes.rows)
    ceilings = jax_ceilings(engine.sizes.dtype, "read")
    conditions = {"steps a dispatch": engine.sizes.steps, "temperature": TEMPERATURE, **at(xla=(xla_flags(), ""))}
    result = bench.result(engine, off, ceilings, [], section="sweep", **conditions)
    for rows, left_out in sweep(engine, bench.place, ceilings):
        result = replace(result, conditions=result.conditions | {"left_out": left_out}, rows=rows)
        if rows:
            write_result(result, bench.out)  # minutes of rows outlive whatever ends the bench
    return shown(result, bench.out)
