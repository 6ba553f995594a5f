"""Checkpoints that strangers made to do harm: each is refused in one line that can be read, or loads as it is."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fullstride.errors import ConfigError
from fullstride.llm.weights import load

LONG = "x" * 5000
HUGE = int("9" * 400)
SHARD, INDEX = "model-00001-of-00002.safetensors", "model.safetensors.index.json"


@pytest.fixture
def folder(tiny_qwen2, tmp_path) -> Path:
    return shutil.copytree(tiny_qwen2, tmp_path / "model")


def _refused(folder: Path, match: str) -> None:
    with pytest.raises(ConfigError, match=match) as caught:
        load(folder)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) <= 1200


def _change(file: Path, **settings: Any) -> None:
    file.write_text(json.dumps((json.loads(file.read_text()) if file.is_file() else {}) | settings))


@pytest.mark.parametrize(
    "name", ["../model-00001-of-00002.safetensors", "{outside}", "a/../../secret", "..", "", ".", "a\0b", LONG, "/"]
)
def test_an_index_names_files_of_its_folder_alone(folder, name):
    outside = folder.parent / "secret.safetensors"
    shutil.copy(folder / SHARD, outside)
    names = json.loads((folder / INDEX).read_text())["weight_map"]
    names[next(iter(names))] = name.format(outside=outside)
    _change(folder / INDEX, weight_map=names)
    _refused(folder, "weight_map names .*: expected a file in its folder$")


def test_files_may_be_links_as_in_hugging_faces_cache_and_lie_in_a_folder_of_the_models(folder):
    expected = load(folder).parameters["layers.1.k_bias"].copy()
    (folder.parent / "blobs").mkdir()
    (folder / "parts").mkdir()
    names = json.loads((folder / INDEX).read_text())["weight_map"]
    for number, file in enumerate(sorted(folder.glob("*.safetensors"))):
        file.rename(folder.parent / "blobs" / f"{number:064x}")
        (folder / "parts" / file.name).symlink_to(f"../../blobs/{number:064x}")
    _change(folder / INDEX, weight_map={tensor: f"parts/{name}" for tensor, name in names.items()})
    np.testing.assert_array_equal(load(folder).parameters["layers.1.k_bias"], expected)


@pytest.mark.parametrize(
    ("file", "settings", "match"),
    [
        ("config.json", {"rope_theta": HUGE, "rope_parameters": None}, "rope_theta=9+.*: expected a positive number"),
        ("config.json", {"rms_norm_eps": HUGE}, "rms_norm_eps=9+"),
        ("config.json", {"rms_norm_eps": float("nan")}, "rms_norm_eps=nan"),
        ("config.json", {"num_hidden_layers": HUGE}, "num_hidden_layers=9+.*whole number below 2\\^31"),
        ("config.json", {"num_hidden_layers": 2**31 - 1}, "2147483647 layers are configured"),
        ("config.json", {"max_position_embeddings": 10**30}, "max_position_embeddings=10+"),
        ("config.json", {"rope_parameters": {"rope_type": "linear", "factor": 1e308}}, "context, scaled, has 2147"),
        ("config.json", {"rope_parameters": {"rope_type": "linear", "factor": HUGE}}, "rope_parameters.factor=9+"),
        ("config.json", {"rope_parameters": {"rope_type": LONG}}, "rope_type=x+.*: expected one of default, linear"),
        ("config.json", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0**60}}, "context, scaled"),
        ("config.json", {"model_type": LONG}, "model_type=x+.*expected one of llama"),
        ("config.json", {"dtype": {"a": [LONG] * 9}}, "dtype=.*: expected"),
        ("generation_config.json", {"temperature": HUGE}, "temperature=9+.*: expected a number"),
        ("generation_config.json", {"top_k": -HUGE}, "top_k=-9+"),
        ("generation_config.json", {"top_p": LONG}, "top_p='x+.*: expected a number"),
        ("tokenizer_config.json", {"eos_token": [LONG] * 99}, "its tokens or template do not have transformers"),
    ],
)  # fmt: skip
def test_settings_that_are_absurd(folder, file, settings, match):
    _change(folder / file, **settings)
    _refused(folder, match)


def _rewritten(folder: Path, change: Any) -> None:
    raw = (folder / SHARD).read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:end])
    name = next(key for key in header if key != "__metadata__")
    change(header, name)
    written = json.dumps(header).encode()
    (folder / SHARD).write_bytes(len(written).to_bytes(8, "little") + written + raw[end:])


@pytest.mark.parametrize(
    ("entry", "match"),
    [
        ({"shape": [1] * 72}, "its header has an invalid entry for .*"),
        ({"shape": [1] * 100_000}, "invalid entry"),
        ({"shape": [2**63] * 3}, "cannot be bytes"),
        ({"shape": [2.0, 24.0]}, "invalid entry"),
        ({"shape": ["8"]}, "invalid entry"),
        ({"shape": [HUGE]}, "cannot be bytes"),
        ({"data_offsets": [0.5, 2.5]}, "invalid entry"),
        ({"data_offsets": [HUGE, HUGE]}, "cut short: .* ends at byte 9"),
        ({"data_offsets": [True, False]}, "invalid entry"),
        ({"dtype": LONG}, "supported are F32"),
    ],
)
def test_what_a_header_says_of_a_tensor(folder, entry, match):
    _rewritten(folder, lambda header, name: header[name].update(entry))
    _refused(folder, match)


@pytest.mark.parametrize(
    "name", [LONG, "a\nb\x1b[31m\u202ec", f"model.layers.{HUGE}.mlp.up_proj.weight", "", "model.layers.-1.x"]
)
def test_what_a_tensor_is_called(folder, name):
    _rewritten(folder, lambda header, old: header.update({name: header.pop(old)}))
    _refused(folder, "these parameters are not a qwen2 model's")


@pytest.mark.parametrize("header", [b"[" * 100_000, b'{"a": ' + b"1" * 5000 + b"}", b"{}" * 9, b"\xff" * 20])
def test_headers_that_are_none(folder, header):
    (folder / SHARD).write_bytes(len(header).to_bytes(8, "little") + header)
    _refused(folder, "not safetensors: its header is not JSON")


@pytest.mark.parametrize("text", ["{% for x in y %}" + LONG, "{% if x %}" * 500 + LONG])
def test_a_template_that_cannot_be_compiled(folder, text):
    (folder / "chat_template.jinja").write_text(text)
    _refused(folder, "the chat template is not valid Jinja")
