"""A real model, SmolLM2: its greedy tokens beside transformers' own, and the same ones however it is run."""

import numpy as np
import pytest
import torch
import transformers

from fullstride.llm.engine import Engine, EngineConfig
from fullstride.llm.sampling_params import SamplingParams
from fullstride.llm.weights import load
from tests.llm.engine.conftest import Completion, finish, forget, run
from tests.llm.engine.test_engine import greedy


def generated(model, ids: list[int], count: int) -> list[int]:
    with torch.no_grad():
        out = model.generate(
            torch.tensor([ids]), max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0
        )
    return out[0, len(ids) :].tolist()


class Real:
    """SmolLM2 in an engine whose pool is too small for all of its rows."""

    def __init__(self, path):
        self.loaded = load(path, dtype="float32")
        config = EngineConfig(
            max_sequences=2, max_tokens_per_step=32, max_length=220, kv_blocks=14, steps_per_dispatch=3
        )
        self.engine = Engine(self.loaded, config)


@pytest.fixture(scope="module")
def real(smollm2) -> Real:
    return Real(smollm2)


def test_200_tokens_of_smollm2_are_those_of_transformers(real):
    config = real.loaded.config
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            max_position_embeddings=config.max_position,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            rms_norm_eps=config.rms_eps,
            tie_word_embeddings=True,
            eos_token_id=None,
        )
    ).eval()
    theirs.load_state_dict(_for_transformers(real.loaded), strict=False)
    ids = real.loaded.tokenizer.encode("The history of the Alps begins")
    assert run(real.engine, (ids, greedy(200)))[0].tokens == generated(theirs, ids, 200)


def _for_transformers(loaded) -> dict[str, torch.Tensor]:
    names = {
        "attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm", "q": "self_attn.q_proj",
        "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj", "gate": "mlp.gate_proj",
        "up": "mlp.up_proj", "down": "mlp.down_proj",
    }  # fmt: skip
    state = {}
    for name, value in loaded.parameters.stream():
        if name.startswith("layers."):
            _, layer, part = name.split(".")
            name = f"layers.{layer}.{names[part]}"
        else:
            name = {"embed": "embed_tokens", "norm": "norm"}[name]
        state[f"model.{name}.weight"] = torch.from_numpy(np.array(value))
    return state | {"lm_head.weight": state["model.embed_tokens.weight"]}


def test_smollm2_answers(real):
    tokenizer = real.loaded.tokenizer
    text = tokenizer.chat([{"role": "user", "content": "What is the capital of France?"}])
    params = SamplingParams(temperature=0.0, max_tokens=20)
    (found,) = run(real.engine, (tokenizer.encode(text, special=False), params))
    assert (found.text, found.finish, found.stop) == ("The capital of France is Paris.", "stop", None)


def test_smollm2_says_the_same_however_it_is_run(real):
    rng, engine, encode = np.random.default_rng(), real.engine, real.loaded.tokenizer.encode
    shared = "Once upon a time, in a village at the foot of a mountain, there lived an old clockmaker. "
    prompts = [encode(text) for text in (shared + "One day", shared + "His daughter", "2 + 2 =", "def sort(")]
    lengths = rng.integers(120, 130, 4).tolist()
    alone = []
    for ids, count in zip(prompts, lengths, strict=True):
        forget(engine)
        alone.append(run(engine, (ids, greedy(count)))[0].tokens)
    before, found = engine.stats().preemptions, {}
    for i in rng.permutation(4).tolist():
        engine.add(str(i), prompts[i], greedy(lengths[i]))
        for _ in range(int(rng.integers(0, 6))):
            for delta in engine.step():
                found.setdefault((delta.request_id, delta.index), Completion()).take(delta)
    finish(engine, found)
    assert [found[str(i), 0].tokens for i in range(4)] == alone
    assert engine.stats().preemptions > before
    assert engine.stats().free_blocks == 14
