"""Folders with matrices of e4m3 codes, as fbgemm, compressed-tensors and Qwen's own fp8 models have them."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from fullstride.errors import ConfigError
from fullstride.llm.weights import load

SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "head_dim": 64}
CHANNEL = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
METHODS: dict[str, dict[str, Any]] = {
    "fbgemm_fp8": {"activation_scale_ub": 1200.0},
    "compressed-tensors": {"format": "float-quantized", "config_groups": {"group_0": {"weights": CHANNEL}}},
    "fp8": {"fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
}


def pack(folder: Path, method: str, **changes: Any) -> dict[str, np.ndarray]:
    """Replace the matrices of a folder's layers by codes and scales; return their numbers in fp64."""
    file, expected = folder / "model.safetensors", {}
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        outputs, inputs = tensors[name].shape
        codes = (50 * tensors[name]).to(torch.float8_e4m3fn)
        if method == "fp8":
            scales = torch.rand(-(-outputs // 128), inputs // 128) / 40
            wide = scales.repeat_interleave(128, 0)[:outputs].repeat_interleave(128, 1)
            tensors[f"{name}_scale_inv"] = scales
        else:
            scales = wide = torch.rand(outputs, 1) / 40
            tensors[f"{name}_scale"] = scales
        tensors[name] = codes
        expected[name] = codes.double().numpy() * wide.double().numpy()
    save_file(tensors, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method} | METHODS[method] | changes
    (folder / "config.json").write_text(json.dumps(config))
    return expected


@pytest.fixture
def folder(tiny_model) -> Path:
    return tiny_model("qwen3", num_hidden_layers=1, **SIZES)


@pytest.mark.parametrize("method", METHODS)
def test_numbers_and_codes_are_those_of_the_file(folder, method):
    expected = pack(folder, method)
    parameters = load(folder, dtype="float32").parameters
    assert load(folder).config.dtype == "bfloat16"
    for ours, theirs in {"q": "self_attn.q_proj", "down": "mlp.down_proj"}.items():
        name, own = f"layers.0.{ours}", expected[f"model.layers.0.{theirs}.weight"]
        np.testing.assert_allclose(parameters[name], own, rtol=1e-6, atol=1e-9)
        np.testing.assert_allclose(parameters.read(name, slice(3, 9), slice(130, 250)), own[3:9, 130:250], rtol=1e-6)
        found = parameters.codes(name, slice(3, 140), slice(128, 256))
        assert found is not None
        assert found.format == ("fp8_128" if method == "fp8" else "fp8")
        codes = found.codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
        np.testing.assert_allclose(codes * found.records.view(np.float32)[:, 0], own[3:140, 128:256], rtol=1e-6)


@pytest.mark.parametrize(("k_scale", "v_scale"), [("self_attn.k_", "self_attn.v_"), ("k_proj.k_", "v_proj.v_")])
def test_scales_of_a_kv_cache_are_passed_over(folder, k_scale, v_scale, caplog):
    before = dict(load(folder, dtype="float32").parameters)
    tensors = load_file(folder / "model.safetensors")
    prefix = "model.layers.0." + "self_attn." * ("proj" in k_scale)
    tensors |= {f"{prefix}{each}scale": torch.tensor([0.5]) for each in (k_scale, v_scale)}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    own = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": scheme}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": own}))
    caplog.set_level("INFO", "fullstride.llm")
    after = load(folder, dtype="float32").parameters
    assert set(after) == set(before)
    assert "2 scales of a KV cache are not read" in caplog.text


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        (
            "fp8",
            {"weight_block_size": None},
            "quantization_config=.*expected 8-bit floats",
        ),
        ("fp8", {"weight_block_size": [64, 128]}, "quantization_config="),
        (
            "compressed-tensors",
            {"config_groups": {"a": {"weights": CHANNEL | {"strategy": "tensor"}}}},
            "expected 8-bit",
        ),
        (
            "compressed-tensors",
            {"config_groups": {"a": {"weights": CHANNEL | {"num_bits": 4}}}},
            "expected 8-bit floats",
        ),
    ],
)
def test_other_scales_are_refused(folder, method, changes, message):
    pack(folder, method, **changes)
    with pytest.raises(ConfigError, match=message):
        load(folder)


def test_missing_scales_are_named(folder):
    pack(folder, "fp8")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight_scale_inv"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"up_proj\.weight \[384, 256\] has the scales {}: expected 384 scales, or"):
        load(folder)
