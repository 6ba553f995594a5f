"""A model shared by several GPUs: `python -m pytest tests/gpu/test_llm_parallel.py -s` on a machine that has them."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from benchmarks.cases.llm.parallel import agreeing, first_logprobs, largest_difference
from benchmarks.cases.llm.shared import complete
from benchmarks.cases.llm.work import SHAPES, ModelWork
from benchmarks.harness.budget import say
from fullstride.errors import ConfigError
from fullstride.llm.config import ModelConfig
from fullstride.llm.engine import Engine, EngineConfig
from fullstride.llm.engine.runner import compiles
from fullstride.llm.kernels import choose
from tests.gpu.test_llm import random_model
from tests.llm.engine.conftest import run
from tests.llm.engine.test_engine import greedy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu" or jax.device_count() < 2, reason="needs two GPUs"),
]

TINY = ModelConfig("qwen3", 355, 128, 256, 3, 8, 4, 32, 2048, qk_norm=True, dtype="float32")
WIDE = ModelConfig("qwen3", 4000, 512, 1024, 4, 16, 8, 128, 2048, tied=True, qk_norm=True, dtype="bfloat16")
COUNTS = [n for n in (1, 2, 4) if n <= jax.device_count()]
WORK = ModelWork([np.random.default_rng(i).integers(3, 350, 11 + 40 * i).tolist() for i in range(4)], [24] * 4)


def engine_of(loaded: Any, count: int, kernels: str, dtype: str | None = None) -> Engine:
    config = EngineConfig(
        max_sequences=2, max_tokens_per_step=66, max_length=256, kv_blocks=80, kernels=kernels,
        tensor_parallel_size=count, compile_cache=False, dtype=dtype,
    )  # fmt: skip
    return Engine(loaded, config)


def agree(config: ModelConfig, kernels: str, counts: list[int] = COUNTS) -> dict[int, tuple[int, float]]:
    """For each number of GPUs: greedy tokens before the first that differs from one GPU's, and logprobs' difference."""
    loaded, found, first = random_model(config), {}, None
    for count in counts:
        engine = engine_of(loaded, count, kernels)
        before = compiles()
        tokens, logprobs = complete(engine, WORK, 0.0), first_logprobs(engine, WORK)
        assert compiles() == before, "compiled while it ran"
        first = first or (tokens, logprobs)
        found[count] = agreeing(tokens, first[0]), largest_difference(logprobs, first[1])
    say(f"{config.hidden_size} wide, {kernels}: of {WORK.tokens} tokens and of logprobs by GPUs: {found}")
    return found


def test_fp32_tokens_are_those_of_one_gpu():
    assert {same for same, _ in agree(TINY, "plain").values()} == {WORK.tokens}


def test_bf16_logprobs_are_as_near_to_fp32s_as_those_of_one_gpu():
    loaded = random_model(WIDE)
    exact = first_logprobs(engine_of(loaded, 1, "plain", "float32"), WORK)
    off = [largest_difference(first_logprobs(engine_of(loaded, n, "paged"), WORK), exact) for n in COUNTS]
    say(f"logprobs' distance from fp32's by GPUs: {off}")
    assert max(off[1:]) < 2 * off[0]


def test_fp32_tokens_of_qwen3s_shape_are_those_of_one_gpu():
    config = replace(SHAPES["qwen3-0.6b"], layers=6, dtype="float32")
    assert {same for same, _ in agree(config, "plain", [1, COUNTS[-1]]).values()} == {WORK.tokens}


def test_auto_takes_paged_attention_and_token_is_refused():
    sizes = (WIDE, "bfloat16", 16, jax.devices()[0])
    assert [choose("auto", *sizes, count).name for count in (1, 2)] == ["token", "paged"]
    with pytest.raises(ConfigError, match="kernels=token: its single launch"):
        choose("token", *sizes, 2)


def test_no_gpu_holds_more_than_its_share_and_the_pool_stays_where_it_is():
    engine = engine_of(random_model(TINY), 2, "plain")
    run(engine, ([5, 6, 7], greedy(9)))
    pool = engine._runner.state.pool
    assert [shard.data.shape[3] for shard in pool.addressable_shards] == [2, 2]
    before = [shard.data.unsafe_buffer_pointer() for shard in pool.addressable_shards]
    run(engine, ([5, 6, 7, 8], greedy(9)), ([9] * 40, greedy(3, repetition_penalty=1.1)))
    after = engine._runner.state.pool.addressable_shards
    assert [shard.data.unsafe_buffer_pointer() for shard in after] == before
