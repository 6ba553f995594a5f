"""AWQ and GPTQ folders: their words packed here one code at a time, as the formats' makers describe them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fullstride.errors import ConfigError
from fullstride.llm.weights import load

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8}
GROUP = 32
AWQ_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)


def words(codes: np.ndarray, places: tuple[int, ...]) -> np.ndarray:
    """Pack eight codes of the last axis into a word; half byte i has code `places[i]`."""
    out = np.zeros((*codes.shape[:-1], codes.shape[-1] // 8), np.uint32)
    for i, place in enumerate(places):
        out |= codes[..., place::8].astype(np.uint32) << np.uint32(4 * i)
    return out.view(np.int32)


def pack(folder: Path, method: str, **changes: Any) -> dict[str, np.ndarray]:
    """Replace the matrices of a folder's layers by random codes; return their numbers in fp64."""
    file, rng, expected = folder / "model.safetensors", np.random.default_rng(), {}
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        base, (outputs, inputs) = name.removesuffix(".weight"), tensors.pop(name).shape
        codes, zeros = rng.integers(0, 16, (outputs, inputs)), rng.integers(1, 16, (inputs // GROUP, outputs))
        scales = rng.uniform(0.01, 0.05, zeros.shape).astype(np.float16)
        each = lambda x: np.repeat(x.astype(np.float64), GROUP, 0).T  # noqa: E731
        expected[base] = (codes - each(zeros)) * each(scales)
        if method == "awq":
            own = {"qweight": words(codes.T, AWQ_PLACES), "qzeros": words(zeros, AWQ_PLACES)}
        else:
            stored = zeros - (changes.get("checkpoint_format") != "gptq_v2")
            own = {"qweight": words(codes, tuple(range(8))).T.copy(), "qzeros": words(stored, tuple(range(8)))}
            own["g_idx"] = np.arange(inputs, dtype=np.int32) // GROUP
        tensors |= {f"{base}.{part}": value for part, value in own.items()} | {f"{base}.scales": scales}
    save_file(tensors, file)
    config = json.loads((folder / "config.json").read_text())
    own = {"quant_method": method, "bits": 4, "group_size": GROUP}
    own |= {"version": "gemm", "zero_point": True} if method == "awq" else {"desc_act": False}
    config["quantization_config"] = own | changes
    (folder / "config.json").write_text(json.dumps(config))
    return expected


@pytest.fixture
def folder(tiny_model) -> Path:
    return tiny_model("qwen2", **SIZES)


METHODS = [("awq", {}), ("gptq", {}), ("gptq", {"checkpoint_format": "gptq_v2"})]


@pytest.mark.parametrize(("method", "changes"), METHODS, ids=["awq", "gptq", "gptq_v2"])
def test_numbers_and_codes_are_those_of_the_words(folder, method, changes):
    expected = pack(folder, method, **changes)
    loaded = load(folder, dtype="float32")
    parameters = loaded.parameters
    assert load(folder).config.dtype == "bfloat16"
    for ours, theirs in {"q": "self_attn.q_proj", "v": "self_attn.v_proj", "down": "mlp.down_proj"}.items():
        name, own = f"layers.1.{ours}", expected[f"model.layers.1.{theirs}"]
        assert parameters.packed_as(name) == "int4_32"
        np.testing.assert_allclose(parameters[name], own, rtol=1e-6, atol=1e-7)
        rows, columns = slice(3, 13), slice(32, 64)
        np.testing.assert_allclose(parameters.read(name, rows, columns), own[rows, columns], rtol=1e-6, atol=1e-7)
        found = parameters.codes(name, rows, columns)
        assert found is not None
        scales, zeros = np.moveaxis(found.records.view(np.float16).astype(np.float64), -1, 0)
        np.testing.assert_allclose((found.codes - zeros) * scales, own[rows, columns], rtol=1e-6, atol=1e-7)
    with pytest.raises(ConfigError, match=r"layers\.0\.q: inputs 0 to 40 are not whole groups of 32"):
        parameters.codes("layers.0.q", None, slice(0, 40))


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        ("gptq", {"bits": 8}, "quantization_config=.*: bits is 8: expected 4"),
        ("gptq", {"desc_act": True}, "desc_act is True: expected False or absent"),
        ("gptq", {"group_size": -1}, "group_size is -1: expected 32 or 64 or 128"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format is marlin"),
        ("awq", {"version": "gemv"}, "version is gemv: expected gemm or absent"),
        ("awq", {"zero_point": False}, "zero_point is False"),
        ("awq", {"group_size": 64}, "qweight .* and qzeros .* beside scales"),
        ("bitsandbytes", {}, "quantization_config=.*bitsandbytes.*models with it are not supported"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(folder, method, changes, message):
    pack(folder, "awq" if method == "awq" else "gptq", **changes, quant_method=method)
    with pytest.raises(ConfigError, match=message):
        load(folder)


def test_inputs_in_another_order_and_ambiguous_zeros_are_refused(folder):
    pack(folder, "gptq")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    index = "model.layers.0.self_attn.q_proj.g_idx"
    save_file(tensors | {index: tensors[index][::-1].copy()}, file)
    with pytest.raises(ConfigError, match=r"q_proj\.g_idx has inputs in another order \(act-order\)"):
        load(folder)
    save_file(tensors | {"model.layers.0.self_attn.q_proj.qzeros": np.full((2, 8), -1, np.int32)}, file)
    with pytest.raises(ConfigError, match="has 15: its writers differ"):
        load(folder).parameters["layers.0.q"]
