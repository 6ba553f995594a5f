import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
import transformers

from fullstride.assets import fetch as assets
from fullstride.errors import ConfigError
from fullstride.llm.config import parameter_shapes
from fullstride.llm.weights import LoadedModel, load
from tests.llm import reference

TINY = ("tiny_qwen3", "tiny_llama", "tiny_qwen2")


@pytest.fixture(params=TINY)
def folder(request) -> Path:
    return request.getfixturevalue(request.param)


def _relative_error(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


def _ours(loaded: LoadedModel, ids: list[int]) -> np.ndarray:
    return reference.logits(loaded.config, loaded.parameters, ids)


def _theirs(path: Path, ids: list[int], **kwargs) -> np.ndarray:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **kwargs).eval()
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].double().numpy()


def test_logits_are_those_of_transformers(folder, seed):
    loaded = load(folder)
    ids = np.random.default_rng(seed).integers(0, loaded.config.vocab_size, 91).tolist()
    assert _relative_error(_ours(loaded, ids), _theirs(folder, ids)) < 1e-5


def test_every_parameter_has_the_shape_that_the_contract_says(folder):
    loaded = load(folder)
    shapes = {name: value.shape for name, value in loaded.parameters.items()}
    assert shapes == parameter_shapes(loaded.config)
    assert list(loaded.parameters) == list(shapes)


def test_the_parameters_are_in_the_dtype_that_is_asked_for(folder):
    plain, halved = load(folder), load(folder, dtype="bfloat16")
    assert (plain.config.dtype, halved.config.dtype) == ("float32", "bfloat16")
    for name, value in halved.parameters.items():
        assert value.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(value, plain.parameters[name].astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_folder_has_a_dtype_of_its_own_in_which_no_value_is_copied(tiny_model, dtype):
    loaded = load(tiny_model("qwen3", dtype=dtype))
    value = loaded.parameters["layers.1.gate"]
    assert loaded.config.dtype == value.dtype.name == dtype
    assert not value.flags.owndata
    assert not value.flags.writeable


def test_config_json_as_it_was_before_version_5(tiny_llama, tmp_path):
    old = shutil.copytree(tiny_llama, tmp_path / "old")
    config = json.loads((old / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope, "torch_dtype": config.pop("dtype")}
    (old / "config.json").write_text(json.dumps(config))
    assert load(old).config == load(tiny_llama).config


def test_ends_come_from_the_generation_config_and_the_tokenizer(tiny_llama, tmp_path):
    folder = shutil.copytree(tiny_llama, tmp_path / "ends")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    loaded = load(folder)
    assert loaded.config.eos == loaded.tokenizer.eos == (7, 9, 2)
    assert loaded.config.bos == 0


def test_a_checkpoint_with_a_needless_head_and_old_frequencies(tiny_qwen3, tmp_path):
    from safetensors.numpy import load_file, save_file

    folder = shutil.copytree(tiny_qwen3, tmp_path / "more")
    tensors = load_file(folder / "model.safetensors")
    noise = np.random.default_rng(0).normal(size=(344, 48)).astype(np.float32)
    tensors |= {"lm_head.weight": noise, "model.layers.0.self_attn.rotary_emb.inv_freq": noise[0]}
    save_file(tensors, folder / "model.safetensors")
    embed = load(folder).parameters["embed"]
    np.testing.assert_array_equal(embed, load(tiny_qwen3).parameters["embed"])


def test_a_name_is_fetched_as_its_asset(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr("fullstride.llm.weights.loading.fetch", lambda name: asked.append(name) or tmp_path / "no.gguf")
    with pytest.raises(FileNotFoundError):
        load("smollm2")
    assert asked == ["smollm2/gguf"]
    assert set(asked) <= set(assets.ASSETS)


def test_what_is_no_model(tmp_path, tiny_qwen3):
    with pytest.raises(ConfigError, match="no such file or folder, nor one of the names smollm2"):
        load(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="neither config.json nor a GGUF file"):
        load(tmp_path)
    for name in "ab":
        (tmp_path / f"{name}.gguf").touch()
    with pytest.raises(ConfigError, match="2 GGUF files: name one"):
        load(tmp_path)
    with pytest.raises(ConfigError, match="dtype=int8: expected one of"):
        load(tiny_qwen3, dtype="int8")


@pytest.mark.parametrize(
    "path", ["/nope", "./models/qwen", "~/nope", "a/b/c", "../x", "nope.gguf", "models/nope.gguf", "a/", "gpt2"]
)
def test_a_path_that_leads_nowhere_is_no_name_of_the_hub(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="nor one of the names smollm2$"):
        load(path)


def test_a_tokenizer_of_more_ids_than_the_model(tiny_model):
    with pytest.raises(ConfigError, match="ids up to 319, the model only 300 rows"):
        load(tiny_model("qwen3", vocab_size=300))
