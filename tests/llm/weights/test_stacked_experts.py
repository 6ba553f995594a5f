"""Experts packed as MXFP4 beside transformers' own unpacking."""

import json
import shutil

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from fullstride.errors import ConfigError
from fullstride.llm.weights import load
from tests.llm import tiny
from tests.llm.gguf_files import write_gguf

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "dtype": "bfloat16"}


@pytest.fixture(scope="module")
def packed(tiny_model, tmp_path_factory):
    """A folder with packed experts, and one with the numbers that transformers makes of them."""
    plain = tiny_model("gpt_oss", **tiny.FAMILIES["gpt_oss"] | SIZES)
    made = shutil.copytree(plain, tmp_path_factory.mktemp("packed") / "model")
    rng, experts = np.random.default_rng(), tiny.FAMILIES["gpt_oss"]["num_local_experts"]
    tensors = load_file(plain / "model.safetensors")
    codes = dict(tensors)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        del codes[name]
        rows, columns = tensors[name].shape[2], tensors[name].shape[1]
        blocks = torch.from_numpy(rng.integers(0, 256, (experts, rows, columns // 32, 16), np.uint8))
        scales = torch.from_numpy(rng.integers(110, 130, (experts, rows, columns // 32), np.uint8))
        codes |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        tensors[name] = convert_moe_packed_tensors(blocks.clone(), scales.clone()).contiguous()
    save_file(tensors, plain / "model.safetensors")
    save_file(codes, made / "model.safetensors")
    config = json.loads((made / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (made / "config.json").write_text(json.dumps(config))
    return made, plain


def test_unpacked_experts_are_those_of_transformers(packed):
    found, expected = (load(folder, dtype="float32") for folder in packed)
    assert found.config == expected.config
    assert found.parameters.kind("layers.1.experts.4.up") == "MXFP4"
    assert list(found.parameters) == list(expected.parameters)
    for name, value in expected.parameters.items():
        np.testing.assert_array_equal(found.parameters[name], value)
    name, rows, columns = "layers.1.experts.2.up", slice(3, 90), slice(7, 50)
    np.testing.assert_array_equal(found.parameters.read(name, rows, columns), found.parameters[name][rows, columns])
    model = load_file(packed[1] / "model.safetensors")["model.layers.0.mlp.experts.gate_up_proj"].float().numpy()
    np.testing.assert_array_equal(expected.parameters["layers.0.experts.3.gate"], model[3, :, 0::2].T)
    np.testing.assert_array_equal(expected.parameters["layers.0.experts.3.up"], model[3, :, 1::2].T)


def test_a_gguf_has_the_same_experts_in_ggmls_order(packed, tmp_path):
    """Codes in halves of a block and not in turns, beside their scale: packed by the `gguf` package."""
    made, plain = packed
    model = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    file = load(write_gguf(tmp_path / "model.gguf", model, "MXFP4"), dtype="float32")
    assert file.parameters.kind("layers.1.experts.4.up") == "MXFP4"
    folder = load(made, dtype="float32")
    for name, value in folder.parameters.items():
        np.testing.assert_array_equal(file.parameters[name], value, err_msg=name)
    name, rows, columns = "layers.1.experts.2.down", slice(3, 60), slice(7, 50)
    np.testing.assert_array_equal(file.parameters.read(name, rows, columns), folder.parameters[name][rows, columns])


DAMAGES = {
    "down_proj of 5 experts: expected one": lambda name, each: (
        each[:-1] if name.endswith("0.mlp.experts.down_proj_scales") else each
    ),
    r"3, 8\]: expected .* of 16 bytes": lambda name, each: each[..., :8] if name.endswith("down_proj_blocks") else each,
    "gate_up_proj of 5 experts": lambda name, each: (
        None if name.endswith("1.mlp.experts.gate_up_proj_scales") else each
    ),
    "k_proj.weight is of U8": lambda name, each: (
        each.view(torch.uint8) if name.endswith("0.self_attn.k_proj.weight") else each
    ),
    "a scale of it is no number": lambda name, each: each * 0 + 255 if name.endswith("scales") else each,
}


@pytest.mark.parametrize("message", DAMAGES)
def test_damaged_packing_is_refused(packed, tmp_path, message):
    made = shutil.copytree(packed[0], tmp_path / "damaged")
    tensors = load_file(made / "model.safetensors")
    changed = {name: DAMAGES[message](name, each) for name, each in tensors.items()}
    kept = {name: each.contiguous() for name, each in changed.items() if each is not None}
    save_file(kept, made / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        dict(load(made).parameters)
