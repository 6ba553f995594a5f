"""`python -m benchmarks llm-token`: decode steps of few rows in one launch, without an engine, against their bound.

A program runs many steps in a row. Before it is timed, its logits are compared with those of the plain kernels in fp32,
and those of many runs with each other: what blocks tell each other has no other order than its own.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from rich.table import Table

from benchmarks.cases.llm import attention_work
from benchmarks.cases.llm.attention import PLAN
from benchmarks.cases.llm.options import STEP_CONTEXTS, STEP_ROWS, TokenOptions
from benchmarks.cases.llm.shared import WIDTH
from benchmarks.cases.llm.work import model
from benchmarks.cases.step_jax.ceilings import jax_ceilings
from benchmarks.harness.budget import NO_TIME, Budget, reason, say
from benchmarks.harness.environment import environment
from benchmarks.harness.results import CaseResult, Row, at
from benchmarks.harness.table import finish, result_table
from fullstride.errors import ConfigError
from fullstride.llm.config import ModelConfig
from fullstride.llm.kernels.cuda import token
from fullstride.llm.kernels.cuda.target import HOPPER, capability_of, target_of
from fullstride.llm.kernels.interface import AttentionShape, StepBatch
from fullstride.llm.kernels.xla.kernels import plain
from fullstride.llm.models.decoder import hidden_states, logits
from fullstride.llm.models.parameters import Weights, put
from fullstride.measure.roofline import roofline_bound
from fullstride.measure.timing import HostClock, Timing, measure

BLOCK, STEPS, RUNS = 16, 50, 40
# Largest error against fp32, as a multiple of the plain step's in bf16.
TOLERANCE = 1.5


class Model(NamedTuple):
    """Weights of a model: in fp32, in bf16, and as the kernel reads them."""

    config: ModelConfig
    exact: Weights
    rounded: Weights
    packed: token.PackedWeights


def run(options: TokenOptions, out: Path) -> Path:
    """Check, measure, print the table and write the JSON; return its path.

    ConfigError without a GPU of compute capability 9.0. GateError if logits are not those of the plain kernels or not
    the same each time; the others are measured and written before.
    """
    device, budget = jax.devices()[0], Budget.of(options.seconds)
    if target_of(capability_of(device)) is not HOPPER:
        raise ConfigError(f"llm-token on {device.device_kind}: expected a GPU of compute capability 9.0")
    loaded = model(options.model, "bfloat16")
    exact, rounded = (put(loaded.config, loaded.parameters, dtype, device) for dtype in ("float32", "bfloat16"))
    own = Model(loaded.config, exact, rounded, token.pack_all(loaded.config, rounded))
    ceilings, weights = jax_ceilings("bfloat16"), sum(each.nbytes for each in own.packed[:5])
    per_token = 4 * own.config.layers * own.config.kv_heads * own.config.head_dim
    rows, gate, wrong, left_out = list[Row](), dict[str, float](), list[str](), list[dict[str, str]]()
    for count, context in ((count, context) for count in options.rows for context in options.contexts):
        name = f"{count} row{'s' * (count != 1)}, context {context}"
        if budget.spent:
            left_out.append({"name": name, "why": NO_TIME})
            continue
        say(name)
        try:
            bench = Bench(own, count, context, options.seed, thread_blocks(own.config, device))
            gate[name], different = bench.error(), bench.different()
            if not gate[name] <= TOLERANCE or different:
                told = f"{gate[name]:.2f} times the plain step's error (expected at most {TOLERANCE})"
                wrong.append(f"{name}: {told}, {different} of {RUNS} runs differ from the first; not timed")
                continue
            timing = bench.timing()
        except Exception as broken:
            wrong.append(f"{name}: {reason(broken)}")
            continue
        size = weights + count * context * per_token
        bound = roofline_bound(weights * count, size, ceilings)
        tokens = count / timing.median_ms * 1e3
        rows.append(Row(name, timing, bound, {"bytes": size, "tokens_per_second": tokens}))
    own_rows = at(rows=(options.rows, STEP_ROWS), contexts=(options.contexts, STEP_CONTEXTS), seed=(options.seed, 0))
    conditions = {
        "model": options.model,
        "precision": "bfloat16",
        "seed": options.seed,
        "left_out": left_out,
        **own_rows,
    }
    result = CaseResult("llm-token", "cuda", conditions | own_rows, gate, ceilings, rows, environment())

    def shown() -> Iterator[Table | str]:
        yield result_table(result)
        yield from (f"{row.name}: {row.extra['tokens_per_second']:.0f} tokens/s" for row in rows)
        yield from (f"{each['name']}: not run: {each['why']}" for each in left_out)

    return finish(result, out, shown, width=WIDTH, wrong=wrong)


class Bench:
    """Decode steps of some rows, all of which have a context of the same length."""

    def __init__(self, own: Model, rows: int, context: int, seed: int, blocks: int):
        config = own.config
        shape = AttentionShape(config.heads, config.kv_heads, config.head_dim, BLOCK, config.head_dim**-0.5, 1e-6)
        drawn = attention_work.draw(np.random.default_rng(seed), shape, rows, context + 1, context + 1, "bfloat16")
        tokens = jax.random.randint(jax.random.key(seed), (rows,), 0, config.vocab_size)
        self._own, self._batch = own, drawn.batch._replace(tokens=tokens)
        size = config.layers, 2, attention_work.slots(shape, rows, context + 1), config.kv_heads, config.head_dim
        self._pool = jax.random.normal(jax.random.key(seed + 1), size, "bfloat16")
        self._scratch = token.fresh_scratch(config, token.padded(rows), blocks)
        step = partial(token.logits, config, block=BLOCK, blocks=blocks)

        def program(times: int, weights: token.PackedWeights, embed: Any, pool: Any, scratch: Any) -> Any:
            def once(_: Any, carry: Any) -> Any:
                _, pool, scratch = carry
                return step(weights, embed, pool, scratch, self._batch)

            blank = jnp.zeros((rows, config.vocab_size), jnp.float32)
            return lax.fori_loop(0, times, once, (blank, pool, scratch))

        self._program = jax.jit(program, static_argnums=0, donate_argnums=(3, 4))

    def error(self) -> float:
        """Return the largest error against the plain step in fp32, over that of the plain step in bf16."""
        exact = plain_logits(self._own.config, self._own.exact, self._batch, self._pool.astype("float32"))
        rounded = plain_logits(self._own.config, self._own.rounded, self._batch, self._pool)
        errors = [float(jnp.abs(x - exact).max()) for x in (self._logits(1), rounded)]
        return errors[0] / errors[1]

    def different(self) -> int:
        """Return how many of some runs give other logits than the first."""
        first = self._logits(1)
        return sum(bool(jnp.any(self._logits(1) != first)) for _ in range(RUNS))

    def timing(self) -> Timing:
        """Time one step."""
        timing = measure(lambda: jax.block_until_ready(self._logits(STEPS)), HostClock(), PLAN)
        return Timing(timing.first_ms, tuple(sample / STEPS for sample in timing.samples_ms), None)

    def _logits(self, times: int) -> jax.Array:
        given = self._own.packed, self._own.rounded.embed, self._pool, self._scratch
        found, self._pool, self._scratch = self._program(times, *given)
        return found


def thread_blocks(config: ModelConfig, device: Any) -> int:
    """Return the number of blocks of threads on the device."""
    return token.blocks(config, device.core_count)


@partial(jax.jit, static_argnums=0)
def plain_logits(config: ModelConfig, weights: Weights, batch: StepBatch, pool: jax.Array) -> jax.Array:
    """Run the step with the plain kernels."""
    kernels = plain(dynamic=False)
    hidden, _ = hidden_states(config, kernels, weights, pool, batch, BLOCK)
    return logits(config, kernels, weights, hidden)
