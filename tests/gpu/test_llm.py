"""The engine on a GPU: `python -m pytest tests/gpu/test_llm.py`."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from fullstride.llm.config import ModelConfig, parameter_shapes
from fullstride.llm.engine import Engine, EngineConfig
from fullstride.llm.engine.runner import compiles
from fullstride.llm.sampling_params import SamplingParams
from fullstride.llm.weights.peft_adapter import Adapter, LowRank
from tests.llm import reference
from tests.llm.engine.conftest import finish, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU"),
]

TINY = ModelConfig("qwen3", 352, 128, 256, 3, 8, 2, 32, 2048, tied=True, qk_norm=True, dtype="float32")
# Of Qwen/Qwen3-0.6B's config.json.
QWEN3 = ModelConfig(
    "qwen3", 151_936, 1024, 3072, 28, 16, 8, 128, 40_960, rope_theta=1e6, tied=True, qk_norm=True, dtype="bfloat16"
)


def random_model(config: ModelConfig, seed: int = 0) -> Any:
    """Weights that keep activations at their size; norms about 1."""
    rng, parameters = np.random.default_rng(seed), {}
    for name, shape in parameter_shapes(config).items():
        values = rng.standard_normal(shape, np.float32)
        parameters[name] = (
            1 + 0.2 * values if len(shape) == 1 else values * (0.3 if "embed" in name else shape[1] ** -0.5)
        )
    return SimpleNamespace(config=config, parameters=parameters, tokenizer=None)


def greedy(count: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, **more)


@pytest.fixture(scope="module")
def tiny() -> Any:
    return random_model(TINY)


@pytest.fixture(scope="module")
def engine(tiny) -> Engine:
    return Engine(tiny, EngineConfig(max_sequences=4, max_tokens_per_step=68, max_length=1024, kv_blocks=72))


def test_adapters_are_those_of_merged_weights(tiny, tmp_path):
    """Rows with an adapter and without in one batch; the engine's own programs for rows that draw greedily."""
    rng, merged, tensors = np.random.default_rng(), dict(tiny.parameters), {}
    for layer in range(TINY.layers):
        for part, name in {"q": "self_attn.q_proj", "o": "self_attn.o_proj", "down": "mlp.down_proj"}.items():
            out, inner = tiny.parameters[f"layers.{layer}.{part}"].shape
            a, b = (rng.normal(0, 0.1, shape).astype(np.float32) for shape in ((4, inner), (out, 4)))
            key = f"base_model.model.model.layers.{layer}.{name}"
            tensors |= {f"{key}.lora_A.weight": a, f"{key}.lora_B.weight": b}
            merged[f"layers.{layer}.{part}"] = tiny.parameters[f"layers.{layer}.{part}"] + 2 * b.astype(np.float64) @ a
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    config = EngineConfig(max_sequences=2, max_tokens_per_step=66, max_length=300, kv_blocks=72)
    engine = Engine(tiny, config, adapters={"own": tmp_path})
    ids = rng.integers(0, TINY.vocab_size, 90).tolist()
    for i, name in enumerate((None, "own")):
        engine.add(str(i), ids, greedy(12), adapter=name)
    found = finish(engine)
    for i, parameters in enumerate((tiny.parameters, merged)):
        tokens = found[str(i), 0].tokens
        logits = reference.logits(TINY, parameters, ids + tokens)[len(ids) - 1 : -1]
        assert (logits.max(-1) - logits[np.arange(12), tokens]).max() < 1e-2


# Windows beside full layers, sinks, a clamped SwiGLU and experts with biases: as GPT-OSS has them.
SINKS = ModelConfig(
    "gpt_oss", 352, 64, 32, 3, 4, 2, 16, 2048, rope_theta=1e4, qkv_bias=True, dtype="float32", windows=(37, None, 37),
    exact_norm=True, activation="swiglu_clamped", experts=5, experts_per_token=2, shared_weights=True,
    expert_bias=True, output_bias=True, sinks=True,
)  # fmt: skip


def _random_adapter(rng: np.random.Generator, rank: int) -> Adapter:
    shapes, updates = parameter_shapes(SINKS), {}
    for name in (f"layers.{i}.{part}" for i in range(SINKS.layers) for part in "qko"):
        (out, inner), scale = shapes[name], 0.2
        a, b = (scale * rng.standard_normal(shape, np.float32) for shape in ((rank, inner), (out, rank)))
        updates[name] = LowRank(a, b)
    return Adapter(Path("random"), rank, updates)


def test_windows_sinks_and_adapters_in_one_batch_are_those_of_a_cpu():
    """The plain kernels' tokens and logprobs on both; a CPU's are tested beside transformers."""
    rng, model = np.random.default_rng(), random_model(SINKS)
    adapters = {"wide": _random_adapter(rng, 4), "thin": _random_adapter(rng, 1)}
    config = EngineConfig(max_sequences=2, max_tokens_per_step=66, max_length=160, kv_blocks=24, block_size=8)
    ids, found = rng.integers(0, SINKS.vocab_size, 90).tolist(), []
    for device in (jax.devices()[0], jax.devices("cpu")[0]):
        engine = Engine(model, replace(config, max_loras=2), devices=[device], adapters=adapters)
        for i, name in enumerate((None, "wide", "thin")):
            engine.add(str(i), ids[: 90 - i], greedy(20, logprobs=0, prompt_logprobs=0), adapter=name)
        found.append(finish(engine))
        assert engine.kernels == "plain"
        assert engine.stats().free_blocks == engine.stats().blocks
    for name, ours in found[0].items():
        theirs = found[1][name]
        assert ours.tokens == theirs.tokens
        told, expected = (
            [place[0].logprob for place in (*each.prompt_logprobs[1:], *each.logprobs)] for each in (ours, theirs)
        )
        np.testing.assert_allclose(told, expected, atol=5e-4)
    assert len({tuple(each.tokens) for each in found[0].values()}) == 3


def expected_logprobs(model: Any, ids: list[int]) -> np.ndarray:
    logits = reference.logits(model.config, model.parameters, ids)
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def test_fp32_logprobs_are_those_of_the_reference(engine, tiny):
    ids = np.random.default_rng().integers(0, 352, 200).tolist()
    (found,) = run(engine, (ids, greedy(20, logprobs=0, prompt_logprobs=0)))
    expected = expected_logprobs(tiny, ids + found.tokens)
    told = [*found.prompt_logprobs[1:], *found.logprobs]
    own = [expected[i, token] for i, token in enumerate((ids + found.tokens)[1:])]
    # fp32 and not TF32, whose error would be a thousand times as large.
    np.testing.assert_allclose([values[0].logprob for values in told], own, atol=2e-4)
    assert found.tokens == expected[199:-1].argmax(-1).tolist()


def test_bf16_logprobs_are_near_the_reference(tiny):
    engine = Engine(
        tiny, EngineConfig(max_sequences=1, max_tokens_per_step=65, max_length=300, kv_blocks=20, dtype="bfloat16")
    )
    ids = np.random.default_rng().integers(0, 352, 200).tolist()
    (found,) = run(engine, (ids, greedy(1, prompt_logprobs=0)))
    rounded = {name: np.asarray(value, "bfloat16").astype(np.float32) for name, value in tiny.parameters.items()}
    expected = expected_logprobs(SimpleNamespace(config=tiny.config, parameters=rounded), ids)
    own = np.array([expected[i, token] for i, token in enumerate(ids[1:])])
    told = np.array([values[0].logprob for values in found.prompt_logprobs[1:]])
    assert np.abs(told - own).mean() < 0.05


def test_the_same_tokens_however_a_request_is_run(engine):
    rng = np.random.default_rng()
    prompts = [rng.integers(0, 352, int(n)).tolist() for n in rng.integers(100, 300, 12)]
    alone = [run(engine, (ids, greedy(150)))[0].tokens for ids in prompts]
    before = compiles()
    together = [completion.tokens for completion in run(engine, *((ids, greedy(150)) for ids in prompts))]
    assert together == alone
    assert engine.stats().preemptions > 0
    assert compiles() == before
    assert engine.stats().free_blocks == engine.stats().blocks


def test_the_state_stays_where_it_is(engine):
    run(engine, ([1, 2, 3], greedy(20)))
    before = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(engine._runner.state)]
    run(engine, ([1, 2, 3], greedy(20)), ([4] * 100, SamplingParams(max_tokens=9, top_p=0.9, logprobs=2)))
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(engine._runner.state)] == before
    for key, compiled in engine._runner.compiled.items():
        if key[0] in ("mixed", "decode"):
            assert compiled.memory_analysis().alias_size_in_bytes >= engine._runner.state.pool.nbytes


def test_qwen3_in_bf16_serves_many_sequences():
    config = EngineConfig(max_sequences=16, max_length=1024, max_tokens_per_step=512)
    engine = Engine(random_model(replace(QWEN3, layers=2)), config)
    assert engine.sizes.dtype == "bfloat16"
    before, rng = compiles(), np.random.default_rng(1)
    for i in range(40):
        ids = rng.integers(0, 150_000, int(rng.integers(1, 800))).tolist()
        engine.add(str(i), ids, SamplingParams(max_tokens=int(rng.integers(1, 200)), ignore_eos=True, seed=i))
    found = finish(engine)
    assert {completion.finish for completion in found.values()} == {"length"}
    assert compiles() == before
