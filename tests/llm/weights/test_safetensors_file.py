import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fullstride.errors import ConfigError
from fullstride.llm.weights.safetensors_file import open_safetensors

ALL = slice(None)


@pytest.fixture
def file(tmp_path, seed) -> Path:
    rng = np.random.default_rng(seed)
    tensors = {
        "a": rng.normal(size=(5, 7)).astype(np.float32),
        "b": rng.normal(size=11).astype(np.float16),
        "c": rng.normal(size=(3, 2)).astype(ml_dtypes.bfloat16),
        "none": np.zeros((0, 4), np.float32),
    }
    save_file(tensors, tmp_path / "made.safetensors", metadata={"format": "np"})
    return tmp_path / "made.safetensors"


def _written(path: Path, header: object, data: bytes = bytes(64)) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def test_every_tensor_is_read_as_the_library_reads_it(file):
    ours, theirs = open_safetensors(file), load_file(file)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        got = ours[name].read(slice(0, len(value)), ALL, value.dtype)
        assert got.dtype == value.dtype
        np.testing.assert_array_equal(got, value)
        assert value.size == 0 or not got.flags.owndata


def test_a_part_in_another_dtype(file):
    value = load_file(file)["a"]
    got = open_safetensors(file)["a"].read(slice(1, 4), slice(2, 6), np.dtype("bfloat16"))
    np.testing.assert_array_equal(got, value[1:4, 2:6].astype(ml_dtypes.bfloat16))


def test_a_file_cut_anywhere_is_refused(file, seed):
    content = file.read_bytes()
    for size in (0, 5, 8, 40, len(content) - 1, int(np.random.default_rng(seed).integers(0, len(content)))):
        file.write_bytes(content[:size])
        with pytest.raises(ConfigError, match="cut short"):
            open_safetensors(file)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"no json", "its header is not JSON"),
        (b"\xff\xfe", "its header is not JSON"),
        (b'{"a":' * 100_000, "its header is not JSON"),
        ([1], "its header is not a JSON object"),
        ({"t": [1]}, "its header has an invalid entry for t"),
        ({"t": {"dtype": "F32", "shape": [2]}}, "its header has an invalid entry for t"),
        ({"t": {"dtype": "F32", "shape": ["x"], "data_offsets": [0, 8]}}, "invalid entry"),
        ({"t": {"dtype": "F32", "shape": [2], "data_offsets": [None, 8]}}, "invalid entry"),
        ({"t": {"dtype": "F32", "shape": [1e999], "data_offsets": [0, 8]}}, "invalid entry"),
        ({"t": {"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]}}, "t is of .*; supported are F32, F16, BF16"),
        ({"t": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}, "t is of U8; supported are F32, F16, BF16"),
        ({"t": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}, "damaged: t of F32"),
        ({"t": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}}, "damaged: t of F32"),
        ({"t": {"dtype": "F32", "shape": [-1, -2], "data_offsets": [0, 8]}}, "damaged: t of F32"),
        ({"t": {"dtype": "F32", "shape": [99], "data_offsets": [0, 396]}}, "t ends at byte 396, but the file has 64"),
    ],
)
def test_damage_is_refused(tmp_path, header, message):
    with pytest.raises(ConfigError, match=message):
        open_safetensors(_written(tmp_path / "bad.safetensors", header))
