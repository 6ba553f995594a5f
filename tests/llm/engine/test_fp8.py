"""Engines with an fp8 KV cache, beside the same ones that keep keys and values as they were computed."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from fullstride.errors import ConfigError
from fullstride.llm.engine import Engine, EngineConfig
from fullstride.llm.engine.runner import compiles
from fullstride.llm.engine.shapes import pool_for
from fullstride.llm.kernels.interface import FP8_POOL
from fullstride.llm.sampling_params import SamplingParams
from fullstride.llm.weights import load
from tests.llm.engine.conftest import TIGHT, finish, run
from tests.llm.engine.test_engine import greedy, prompt


class Difference(NamedTuple):
    """Differences between the logprobs of one text's tokens, each given all tokens before it."""

    mean: float
    largest: float
    same_best: float


def difference(full: Engine, codes: Engine, ids: list[int]) -> Difference:
    """Between two engines' logprobs of a text, and the share of places where the same token is the most probable."""
    told = []
    for engine in (full, codes):
        (found,) = run(engine, (ids, greedy(1, prompt_logprobs=1)))
        told.append([values for values in found.prompt_logprobs[1:] if values])
    own = np.array([[values[0].logprob for values in places] for places in told])
    best = np.array([[max(values, key=lambda value: value.logprob).token for values in places] for places in told])
    gap = np.abs(own[0] - own[1])
    return Difference(float(gap.mean()), float(gap.max()), float((best[0] == best[1]).mean()))


@pytest.fixture(scope="module")
def codes(qwen3) -> Engine:
    return Engine(qwen3, replace(TIGHT, kv_cache_dtype="fp8"))


@pytest.fixture
def rng(seed) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_the_same_tokens_however_a_request_is_run(codes, rng):
    """Decoding and prefilling write the same codes: alone, together, preempted, cached."""
    shared = prompt(rng, 21)
    prompts = [shared + prompt(rng, 8), shared + prompt(rng, 30), prompt(rng, 50), prompt(rng, 3), prompt(rng, 40)]
    alone = [run(codes, (ids, greedy(30)))[0].tokens for ids in prompts]
    before = codes.stats().preemptions
    assert [found.tokens for found in run(codes, *((ids, greedy(30)) for ids in prompts))] == alone
    assert codes.stats().preemptions > before


def test_nothing_is_compiled_or_moved_once_it_runs(codes, rng):
    run(codes, ([5, 6, 7], greedy(9)))
    before, places = compiles(), pointers(codes)
    codes.add("n", prompt(rng, 50), SamplingParams(n=3, max_tokens=20, temperature=0.7, top_k=5, min_p=0.1))
    codes.add("l", prompt(rng, 3), SamplingParams(logprobs=4, prompt_logprobs=3, logit_bias={5: 2.0}))
    codes.add("p", prompt(rng, 70), greedy(25, repetition_penalty=1.2))
    finish(codes)
    assert (compiles(), pointers(codes)) == (before, places)


def pointers(engine: Engine) -> list[int]:
    return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(engine._runner.state)]


def test_the_pool_is_a_quarter_of_float32_and_its_scales(shared, codes):
    full, small = (engine._runner.state.pool for engine in (shared, codes))
    # Of 41 blocks of heads of 16, two bytes a head and token; an array has whole blocks.
    scales = -(-41 * 2 // 16) * TIGHT.block_size
    assert small.shape == (*full.shape[:2], full.shape[2] + scales, *full.shape[3:])
    assert (codes.sizes.dtype, 4 * small[:, :, :-scales].nbytes) == ("float32", full.nbytes)


def test_it_differs_from_the_full_pool_and_not_by_much(engine, codes, rng):
    found = difference(engine, codes, prompt(rng, 110))
    # A model of two layers with random weights: three bits of mantissa in each key and value.
    assert 1e-4 < found.mean < 0.3


@pytest.mark.thorough
def test_keys_and_values_of_any_size(qwen3, codes, rng):
    """Tiny keys and large values, which larger queries and a smaller output matrix make up for: the same model."""
    factors = {"q_norm": 2.0**13, "k_norm": 2.0**-13, "v": 2.0**13, "o": 2.0**-13}
    parameters = {name: value * factors.get(name.rpartition(".")[2], 1) for name, value in qwen3.parameters.items()}
    model: Any = SimpleNamespace(config=qwen3.config, parameters=parameters, tokenizer=None)
    other = Engine(model, replace(TIGHT, kv_cache_dtype="fp8", max_sequences=1))
    ids, params = prompt(rng, 40), greedy(20, logprobs=0)
    own, found = (run(engine, (ids, params))[0] for engine in (codes, other))
    assert found.tokens == own.tokens
    logprobs = ([places[0].logprob for places in each.logprobs] for each in (own, found))
    np.testing.assert_allclose(*logprobs, rtol=1e-4, atol=1e-5)


def test_names_of_the_dtype():
    for name in ("fp8", "fp8_e4m3", "fp8_per_token_head"):
        assert pool_for(EngineConfig(kv_cache_dtype=name), "float32") == FP8_POOL
    assert pool_for(EngineConfig(), "float32") == "float32"
    with pytest.raises(ConfigError, match="kv_cache_dtype=fp8_e5m2: expected one of"):
        EngineConfig(kv_cache_dtype="fp8_e5m2")


@pytest.mark.thorough
def test_a_real_model_says_nearly_the_same(smollm2):
    """SmolLM2 goes on with a text by itself; then every token of that is asked for with either KV cache."""
    loaded: Any = load(smollm2, dtype="float32")
    config = EngineConfig(
        max_sequences=1, max_tokens_per_step=64, max_length=112, kv_blocks=7, steps_per_dispatch=4, prefix_cache=False
    )
    full, codes = Engine(loaded, config), Engine(loaded, replace(config, kv_cache_dtype="fp8", prefix_cache=True))
    ids = loaded.tokenizer.encode("The history of the Alps begins")
    said = run(full, (ids, greedy(100)))[0].tokens
    before, after = (run(codes, (said[:40], greedy(40)))[0] for _ in range(2))
    assert (before.cached, after.cached, after.tokens) == (0, 32, before.tokens)
    found = difference(full, codes, ids + said)
    assert found.mean < 0.1
    assert found.same_best > 0.9
