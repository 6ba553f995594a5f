import json
import shutil
from functools import cache

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fullstride.errors import ConfigError
from fullstride.llm.families import FAMILIES, Family
from fullstride.llm.models.tensor_parallel import refusal
from fullstride.llm.weights import load
from tests.llm import tiny

# Qwen2's layers under names of its own, and a switch that nobody has written.
TOY = Family(
    qkv_bias=True,
    fixed={"toy_gate": (False,)},
    tensors={f"self_attn.shift_{name}": f"{name}_bias" for name in "qkv"},
)


@pytest.fixture
def folder(tiny_qwen2, tmp_path, monkeypatch):
    """The tiny Qwen2 as a folder of the toy family has it."""
    monkeypatch.setitem(FAMILIES, "toy", TOY)
    made = shutil.copytree(tiny_qwen2, tmp_path / "toy")
    (made / "model.safetensors.index.json").unlink()
    for file in made.glob("*.safetensors"):
        save_file({_toys(name): value for name, value in load_file(file).items()}, file)
    _change(made, model_type="toy")
    return made


def _toys(name):
    for part in "qkv":
        name = name.replace(f"self_attn.{part}_proj.bias", f"self_attn.shift_{part}")
    return name


def _change(folder, **settings):
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | settings))


def test_a_family_of_another_file_is_a_row(folder, tiny_qwen2):
    toy, qwen2 = load(folder), load(tiny_qwen2)
    assert toy.config.architecture == "toy"
    assert toy.config.qkv_bias
    assert list(toy.parameters) == list(qwen2.parameters)
    for name, value in toy.parameters.items():
        np.testing.assert_array_equal(value, qwen2.parameters[name])


def test_what_a_family_has_not_written_is_refused(folder):
    _change(folder, toy_gate=True)
    with pytest.raises(ConfigError, match="toy_gate=True: models with it are not supported, only False"):
        load(folder)


def test_a_family_that_is_not_there_is_refused_by_the_names_of_those_that_are(folder):
    _change(folder, model_type="other")
    with pytest.raises(ConfigError, match="model_type=other: expected one of llama, qwen2, qwen3, .*, toy"):
        load(folder)


# What would change the arithmetic of each family and is not computed, or cannot be.
REFUSED = [
    (
        "mistral",
        {"layer_types": ["full_attention", "sliding_attention"]},
        r"layer_types\[0\]=full_attention: expected sl",
    ),
    ("mistral", {"sliding_window": -4}, "sliding_window=-4: expected a positive whole number"),
    ("mistral", {"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000: expected at most 4096"),
    ("smollm3", {"no_rope_layers": [1]}, r"no_rope_layers=\[1\]: expected 1 or 0 for each of 3 layers"),
    ("smollm3", {"use_sliding_window": True}, "use_sliding_window=True: models with it are not supported"),
    ("granite", {"mlp_bias": True}, "mlp_bias=True"),
    ("granite", {"residual_multiplier": "x"}, "residual_multiplier=x: expected a positive number"),
    ("phi3", {"rope_parameters": {"partial_rotary_factor": 1.5}}, "partial_rotary_factor=1.5: expected at most 1"),
    ("phi3", {"rope_parameters": {"rope_type": "longrope", "short_factor": [1, 2]}}, "has 2 numbers: expected 4"),
    ("olmo2", {"clip_qkv": 3.0}, "clip_qkv=3.0"),
    ("gemma2", {"hidden_activation": "relu"}, "hidden_activation=relu"),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
    ("gemma2", {"layer_types": ["chunked_attention"] * 3}, "layer_types=.*: expected sliding_attention or full"),
    ("gemma3_text", {"attn_logit_softcapping": 30.0}, "attn_logit_softcapping=30.0"),
    (
        "gemma3_text",
        {"rope_parameters": {"sliding_attention": {"rope_type": "linear"}}},
        "rope_type=linear: expected d",
    ),
    ("qwen3_moe", {"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\]"),
    ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step=2"),
    ("gpt_oss", {"attention_bias": False}, "attention_bias=False: models with it are not supported, only True"),
    ("gpt_oss", {"swiglu_alpha": 1.5}, "swiglu_alpha=1.5"),
    ("gpt_oss", {"quantization_config": {"quant_method": "bnb"}}, "quantization_config=.*bnb"),
    ("gpt_oss", {"num_local_experts": 10**9}, "gate_up_proj of 1000000000 experts: expected one tensor, or its"),
    ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok=9: expected at most 5, the experts"),
    ("mixtral", {"num_local_experts": 10**9}, "2 layers of 1000000000 experts are configured, but the file has only"),
]


@pytest.fixture(scope="module")
def saved(tiny_model):
    """A folder of each family, made once."""
    return cache(lambda kind: tiny_model(kind, **tiny.FAMILIES[kind]))


@pytest.mark.parametrize(("kind", "settings", "message"), REFUSED)
def test_what_would_change_the_arithmetic_is_refused(saved, tmp_path, kind, settings, message):
    made = shutil.copytree(saved(kind), tmp_path / kind)
    _change(made, **settings)
    with pytest.raises(ConfigError, match=message):
        load(made)


def test_gemmas_of_before_version_5_are_the_same(saved, tmp_path):
    made = shutil.copytree(saved("gemma3_text"), tmp_path / "gemma3")
    config, ropes = made / "config.json", tiny.FAMILIES["gemma3_text"]["rope_parameters"]
    raw = json.loads(config.read_text())
    for key in ("rope_parameters", "layer_types", "tie_word_embeddings"):
        del raw[key]
    linear = {"rope_type": "linear", "factor": ropes["full_attention"]["factor"]}
    raw |= {"rope_theta": 1e5, "rope_local_base_freq": 500.0, "rope_scaling": linear, "sliding_window_pattern": 3}
    config.write_text(json.dumps(raw))
    assert load(made).config == load(saved("gemma3_text")).config


@pytest.mark.parametrize(
    ("kind", "reason"), [("mixtral", "mixture of experts"), ("olmo2", "normalized over all heads")]
)
def test_what_several_devices_cannot_share_is_refused(saved, kind, reason):
    assert reason in str(refusal(load(saved(kind)).config, 2))
    assert refusal(load(saved(kind)).config, 1) is None


# A window of a context's length hides nothing, and kernel sets that know none can run the model; those of Gemma 3 tell
# which layers' RoPE differs.
@pytest.mark.parametrize(
    ("kind", "settings", "windows"),
    [
        ("phi3", {"sliding_window": 144}, ()),
        ("phi3", {"sliding_window": 143}, (143, 143)),
        ("gemma2", {"sliding_window": 256}, ()),
        ("gemma3_text", {"sliding_window": 256}, (256, 256, None)),
    ],
)
def test_windows_that_hide_nothing_are_none(saved, tmp_path, kind, settings, windows):
    made = shutil.copytree(saved(kind), tmp_path / kind)
    _change(made, **settings)
    assert load(made).config.windows == windows


def test_longrope_ends_where_its_short_factors_do(saved):
    assert load(saved("phi3")).config.max_position == 144
