"""Logits and greedy tokens of every family beside transformers' own, on random models of odd sizes."""

import shutil
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file, save_file

from fullstride.llm.engine import Engine, EngineConfig
from fullstride.llm.weights import load
from tests.llm import tiny
from tests.llm.engine.conftest import Completion, run
from tests.llm.engine.test_engine import continued, greedy, logprobs_of
from tests.llm.lora import ATTENTION, MLP, merged, save_adapter
from tests.llm.models.test_decoder import require_transformers_logits

OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral without a window": ("mistral", {"sliding_window": None}),
    "smollm3 by its interval": ("smollm3", {"num_hidden_layers": 4}),
    "phi3 whose whole heads turn": ("phi3", {"tie_word_embeddings": True}),
    "gemma2 without caps": (
        "gemma2",
        # With larger weights scores without a cap take fp32's rounding beyond what tells a wrong model.
        tiny.FAMILIES["gemma2"]
        | {"attn_logit_softcapping": None, "final_logit_softcapping": None, "initializer_range": 0.1},
    ),
    "gemma3 with a cap of logits": ("gemma3_text", {"head_dim": 8, "final_logit_softcapping": 4.0}),
    "qwen3_moe of probabilities over all": ("qwen3_moe", tiny.FAMILIES["qwen3_moe"] | {"norm_topk_prob": False}),
}
pytestmark = pytest.mark.usefixtures("compiled_soon")
SMALL = EngineConfig(
    max_sequences=1, max_tokens_per_step=32, block_size=4, kv_blocks=40, max_length=144, steps_per_dispatch=2
)


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_logits_are_those_of_transformers(tiny_model, name):
    require_transformers_logits(tiny_model(name, dtype="bfloat16", **tiny.FAMILIES[name]), 131, bfloat16=True)


# Without a window a mistral is a llama, and without caps a gemma2 has what a gemma3 never has.
LIKE_OTHERS = ("mistral without a window", "gemma2 without caps")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.thorough) if name in LIKE_OTHERS else name for name in OTHERS]
)
def test_logits_of_other_settings(tiny_model, name):
    kind, settings = OTHERS[name]
    require_transformers_logits(tiny_model(kind, **settings), 67)


@pytest.fixture(scope="module")
def with_images(tmp_path_factory):
    """A random Gemma 3 that sees images."""
    text = tiny.BASE | tiny.FAMILIES["gemma3_text"]
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config=text,
        vision_config=sizes | {"image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        image_token_index=343,
    )
    folder = tmp_path_factory.mktemp("images")
    tiny.save_tokenizer(folder)
    transformers.AutoModelForImageTextToText.from_config(config, dtype="float32").save_pretrained(folder)
    return folder


@pytest.mark.thorough  # the next one compares configuration and parameters
def test_logits_of_a_model_that_sees_images_are_those_of_its_text(with_images):
    require_transformers_logits(with_images, 67)


def test_a_model_that_sees_images_is_one_of_text_by_names_of_either_version(with_images, tiny_model, tmp_path):
    """Its language model has the configuration of a text model of these settings."""
    made, file = shutil.copytree(with_images, tmp_path / "new"), "model.safetensors"
    tensors = load_file(with_images / file)
    assert any(name.startswith("language_model.model.") for name in tensors)
    newer = {f"model.{name.replace('language_model.model', 'language_model')}": each for name, each in tensors.items()}
    save_file(newer, made / file)
    found, expected = load(made), load(with_images)
    text = load(tiny_model("gemma3_text", **tiny.FAMILIES["gemma3_text"])).config
    assert found.config == expected.config == replace(text, architecture="gemma3")
    assert found.config.max_position == 256
    for name, value in expected.parameters.items():
        np.testing.assert_array_equal(found.parameters[name], value)
    theirs = tensors["language_model.model.layers.1.self_attn.k_proj.weight"]
    np.testing.assert_array_equal(found.parameters["layers.1.k"], theirs)


# Matrices that hold several parameters with rotated rows in an order of their own; norms around attention and MLP;
# factors of what is added.
@pytest.mark.parametrize(
    "name", ["phi3", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("granite", "gemma2", "mixtral"))]
)
def test_logits_with_an_adapter_are_those_of_merged_weights(tiny_model, tmp_path, name, seed):
    folder, rng = tiny_model(name, **tiny.FAMILIES[name]), np.random.default_rng(seed)
    modules = {"phi3": ("qkv_proj", "o_proj", "gate_up_proj"), "mixtral": ATTENTION}.get(name, ATTENTION + MLP)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    made = save_adapter(tmp_path / "made", model, rng, rank=3, modules=modules)
    require_transformers_logits(folder, 67, made, lambda model: merged(model, made))


# A window in every layer, and in some of them with experts and sinks; the logits of all families are compared above.
SOME = ("mistral", "gpt_oss")
REST = [pytest.param(name, marks=pytest.mark.thorough) for name in tiny.FAMILIES if name not in SOME]


@pytest.mark.parametrize("name", [*SOME, *REST])
def test_tokens_and_logprobs_are_those_of_transformers(tiny_model, name, seed):
    """A prompt of several chunks, and another; decoding goes past the window, and starts past it."""
    rng, folder = np.random.default_rng(seed), tiny_model(name, **tiny.FAMILIES[name])
    engine = Engine(load(folder), SMALL)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    prompts = [rng.integers(3, 320, count).tolist() for count in (25, 75)]
    windows = engine.model.cache_windows
    params, last, held = greedy(15, logprobs=0, prompt_logprobs=0), Completion(), []
    found = [*run(engine, (prompts[0], params)), last]
    engine.add("1", prompts[1], params)
    while engine.busy:
        for delta in engine.step():
            last.take(delta)
        held.append(engine.stats().blocks - engine.stats().free_blocks)
    # Of 89 tokens all blocks are held in layers without a window, and in others those that some token still sees.
    assert 22 * windows.count(None) <= held[-2] <= sum(23 if window is None else window // 4 + 3 for window in windows)
    assert max(held) <= engine.sizes.needed(89)
    assert held[-1] == 0
    assert [completion.tokens for completion in found] == [continued(theirs, ids, 15) for ids in prompts]
    for ids, completion in zip(prompts, found, strict=True):
        expected, whole = logprobs_of(theirs, ids + completion.tokens), ids + completion.tokens
        told = [place[0].logprob for place in (*completion.prompt_logprobs[1:], *completion.logprobs)]
        np.testing.assert_allclose(told, [expected[i][token] for i, token in enumerate(whole[1:])], atol=2e-3)
    # Blocks that were given back are found as long as nothing has taken them; and the shortest prompt.
    again, short = run(engine, (prompts[1], greedy(15)), (prompts[0][:1], greedy(3)))
    assert (again.cached, again.tokens) == (72, last.tokens)
    assert short.tokens == continued(theirs, prompts[0][:1], 3)
