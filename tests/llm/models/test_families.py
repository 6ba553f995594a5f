"""Logits and greedy tokens of every family beside transformers' own, on random models of odd sizes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers

from fullstride.llm.engine import Engine, EngineConfig
from fullstride.llm.weights import load
from tests.llm import tiny
from tests.llm.engine.conftest import run
from tests.llm.engine.test_engine import continued, greedy, logprobs_of
from tests.llm.models.test_decoder import require_transformers_logits

OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral without a window": ("mistral", {"sliding_window": None}),
    "smollm3 by its interval": ("smollm3", {"num_hidden_layers": 4}),
    "phi3 whose whole heads turn": ("phi3", {"tie_word_embeddings": True}),
    "gemma2 without caps": (
        "gemma2",
        tiny.FAMILIES["gemma2"] | {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma3 with a cap of logits": ("gemma3_text", {"head_dim": 8, "final_logit_softcapping": 4.0}),
    "qwen3_moe of probabilities over all": ("qwen3_moe", tiny.FAMILIES["qwen3_moe"] | {"norm_topk_prob": False}),
}
# One for rows of single tokens and tiles, few and small.
SMALL = EngineConfig(
    max_sequences=2, max_tokens_per_step=32, block_size=4, kv_blocks=80, max_length=144, steps_per_dispatch=2
)


@pytest.fixture(scope="module", params=tiny.FAMILIES)
def folder(request, tiny_model):
    return tiny_model(request.param, **tiny.FAMILIES[request.param])


def test_logits_are_those_of_transformers(folder):
    require_transformers_logits(folder, 131)


@pytest.mark.parametrize("name", OTHERS)
def test_logits_of_other_settings(tiny_model, name):
    kind, settings = OTHERS[name]
    require_transformers_logits(tiny_model(kind, **settings), 67)


def test_greedy_tokens_and_prompt_logprobs_are_those_of_transformers(folder, seed):
    """Prompts of several chunks, past every window; decoding starts before the window ends, and after."""
    rng = np.random.default_rng(seed)
    engine = Engine(load(folder), SMALL)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    prompts = [rng.integers(3, 320, count).tolist() for count in (23, 75)]
    found = run(engine, *((ids, greedy(17, prompt_logprobs=0)) for ids in prompts))
    for ids, completion in zip(prompts, found, strict=True):
        assert completion.tokens == continued(theirs, ids, 17)
        expected = logprobs_of(theirs, ids)[np.arange(len(ids) - 1), ids[1:]]
        ours = [entry[token].logprob for entry, token in zip(completion.prompt_logprobs[1:], ids[1:], strict=True)]
        np.testing.assert_allclose(ours, expected, atol=2e-3)
