import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fullstride.errors import ConfigError
from fullstride.llm.config import YarnRope
from fullstride.llm.weights import load
from tests.llm.tiny import LLAMA


@pytest.fixture
def folder(tiny_qwen2, tmp_path) -> Path:
    return shutil.copytree(tiny_qwen2, tmp_path / "model")


def _change(file: Path, **settings) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def _tensors(folder: Path, change) -> None:
    """One safetensors file of all tensors after a change to them."""
    files = sorted(folder.glob("*.safetensors"))
    tensors = {name: value for file in files for name, value in load_file(file).items()}
    for file in (*files, folder / "model.safetensors.index.json"):
        file.unlink()
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_several_files_without_an_index(folder):
    whole = load(folder)
    (folder / "model.safetensors.index.json").unlink()
    for name, value in load(folder).parameters.items():
        np.testing.assert_array_equal(value, whole.parameters[name])


def test_one_file_of_whatever_name(folder):
    whole = load(folder).parameters["layers.1.k_bias"].copy()
    _tensors(folder, lambda tensors: None)
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    np.testing.assert_array_equal(load(folder).parameters["layers.1.k_bias"], whole)
    assert whole.std() > 0.1


def test_files_that_are_not_there(folder):
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ConfigError, match="names model-00002-of-00002.safetensors, which the folder does not have"):
        load(folder)
    for file in folder.glob("model*"):
        file.unlink()
    (folder / "pytorch_model.bin").touch()
    with pytest.raises(ConfigError, match=r"no \*.safetensors; convert weights"):
        load(folder)


def test_tensors_that_are_missing_unexpected_or_of_another_shape(folder):
    def change(tensors):
        del tensors["model.norm.weight"], tensors["model.layers.0.mlp.up_proj.weight"]
        tensors["model.layers.0.mlp.experts.weight"] = np.zeros((2, 2), np.float32)
        tensors["model.layers.1.self_attn.k_proj.weight"] = np.zeros((16, 47), np.float32)

    _tensors(folder, change)
    message = (
        "not a qwen2 model's as configured: missing: norm, layers.0.up; unexpected: model.layers.0.mlp.experts.weight;"
        r" of another shape: layers.1.k \[16, 47\] instead of \[16, 48\]"
    )
    with pytest.raises(ConfigError, match=message):
        load(folder)


def test_a_long_list_is_cut_short(folder):
    _change(folder / "config.json", num_hidden_layers=4)
    with pytest.raises(ConfigError, match="missing: layers.2.attn_norm, .* and 19 more"):
        load(folder)
    _change(folder / "config.json", num_hidden_layers=10**9)
    with pytest.raises(ConfigError, match="1000000000 layers are configured, but the file has only 27 tensors"):
        load(folder)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model_type": "bloom"}, "model_type=bloom: expected one of llama, qwen2, qwen3"),
        ({"model_type": None}, "model_type=None: expected one of"),
        ({"hidden_act": "gelu"}, "hidden_act=gelu: models with it are not supported, only silu"),
        ({"use_sliding_window": True}, "use_sliding_window=True"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config=.*gptq"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}},
            "rope_type=dynamic: expected one of default, lin",
        ),
        ({"rope_parameters": None, "rope_scaling": {"type": "longrope"}}, "short_factor=None: expected a list"),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            r"layer_types\[1\]=sliding_attention: expected full",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 5.0}}},
            "rope_parameters.full_attention: expected one RoPE",
        ),
        ({"rope_parameters": {"rope_type": [1]}}, r"rope_type=\[1\]: expected one of"),
        ({"rope_parameters": 3}, "rope_parameters=3: expected an object"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.factor=None: expected a positive number"),
        ({"rope_parameters": {"rope_theta": "big"}}, "rope_parameters.rope_theta=big: expected a positive number"),
        ({"rope_parameters": {"rope_theta": -1}}, "rope_parameters.rope_theta=-1: expected a positive number"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5: expected 1"),
        (
            {"rope_parameters": dict(LLAMA["rope_parameters"], low_freq_factor=4.0)},
            "low_freq_factor=4.0: expected less than high_freq_factor, which is 4.0",
        ),
        ({"rms_norm_eps": "x"}, "rms_norm_eps=x: expected a positive number"),
        ({"head_dim": "x"}, "head_dim=x: expected a positive whole number"),
        ({"num_key_value_heads": [1]}, r"num_key_value_heads=\[1\]: expected a positive whole number"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "the llama3 rope lacks low_freq_factor"),
        ({"hidden_size": None}, "hidden_size=None: expected a positive whole number"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers=two: expected a positive whole number"),
        ({"num_key_value_heads": 4}, "6 query heads cannot share 4 key heads evenly"),
        ({"head_dim": 7}, "head_dim is 7, expected an even number"),
        ({"dtype": "float8_e4m3fn"}, "dtype=float8_e4m3fn: expected one of"),
    ],
)
def test_what_is_not_run_is_refused(folder, settings, message):
    _change(folder / "config.json", **settings)
    with pytest.raises(ConfigError, match=message):
        load(folder)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    "both",
    [
        {"rope_parameters": YARN | {"rope_theta": 5e5}, "rope_scaling": None},
        {"rope_parameters": YARN | {"rope_theta": 5e5}, "rope_scaling": {}},
        {"rope_parameters": YARN | {"rope_theta": 5e5}, "rope_scaling": YARN | {"rope_theta": 5e5}},
        {"rope_parameters": YARN | {"rope_theta": 5e5}, "rope_scaling": YARN, "rope_theta": 5e5},
        # In older words, and with a default written out.
        {
            "rope_parameters": YARN | {"rope_theta": 5e5, "beta_fast": 32},
            "rope_scaling": {"type": "yarn"} | {key: YARN[key] for key in YARN if key != "rope_type"},
        },
        {"rope_parameters": YARN, "rope_scaling": YARN | {"rope_theta": 5e5}},
        {"rope_parameters": None, "rope_scaling": YARN, "rope_theta": 5e5},
    ],
)
def test_two_ropes_that_say_the_same_are_one(folder, both):
    _change(folder / "config.json", **both)
    config = load(folder).config
    assert (config.rope_theta, config.max_position) == (5e5, 256)
    assert config.rope_scaling == YarnRope(4.0, 64, 32.0, 1.0, 0.1 * math.log(4) + 1)


@pytest.mark.parametrize(
    ("parameters", "scaling"),
    [
        # What model cards say to add for long texts, to a file of version 5.
        ({"rope_type": "default", "rope_theta": 1e6}, YARN),
        ({"rope_theta": 1e6}, {"type": "linear", "factor": 2.0}),
        (YARN, YARN | {"factor": 2.0}),
        (YARN | {"rope_theta": 1e6}, YARN | {"rope_theta": 1e4}),
    ],
)
def test_two_ropes_that_differ_are_refused(folder, parameters, scaling):
    _change(folder / "config.json", rope_parameters=parameters, rope_scaling=scaling)
    message = "rope_parameters=.* and rope_scaling=.*: expected one of them, or two that agree: keep the one"
    with pytest.raises(ConfigError, match=message):
        load(folder)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (
            "generation_config.json",
            {"eos_token_id": {"a": 1}},
            "generation_config.json: eos_token_id=.*expected token ids",
        ),
        ("tokenizer_config.json", {"eos_token": 5}, "tokenizer_config.json: its tokens or template do not have"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"500": {}}}, "KeyError: 'content'"),
        ("tokenizer_config.json", {"chat_template": [{"name": "default"}]}, "KeyError: 'template'"),
        ("model.safetensors.index.json", {"weight_map": []}, "weight_map: expected an object with a file's name"),
        ("model.safetensors.index.json", {"weight_map": {"a": None}}, "weight_map: expected an object"),
    ],
)
def test_files_of_another_shape_are_refused(folder, file, content, message):
    _change(folder / file, **content)
    with pytest.raises(ConfigError, match=message):
        load(folder)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_json_nested_deeper_than_python_reads_is_refused(folder, file):
    (folder / file).write_text('{"a":' * 100_000)
    with pytest.raises(ConfigError, match=f"{file}: not valid JSON") as caught:
        load(folder)
    assert "\n" not in str(caught.value)


def test_ends_that_the_model_has_no_row_for_are_left_out(folder):
    _change(folder / "generation_config.json", eos_token_id=[343, 344, 2**70])
    assert load(folder).config.eos == (343, 2)


def test_no_key_heads_in_the_configuration_means_one_for_each_query(tiny_model):
    folder = tiny_model("llama", num_key_value_heads=6)
    config = json.loads((folder / "config.json").read_text())
    for key in ("num_key_value_heads", "head_dim", "rope_parameters", "dtype"):
        del config[key]
    (folder / "config.json").write_text(json.dumps(config))
    loaded = load(folder).config
    assert (loaded.kv_heads, loaded.head_dim, loaded.rope_theta, loaded.dtype) == (6, 8, 10_000.0, "float32")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_configuration_without_a_dtype_is_of_that_of_the_files(tiny_model, dtype):
    folder = tiny_model("qwen3", dtype=dtype)
    _change(folder / "config.json", dtype=None)
    assert load(folder).config.dtype == dtype
