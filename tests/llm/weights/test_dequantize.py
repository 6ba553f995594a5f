import gguf
import numpy as np
import pytest
from gguf.quants import quantize

from fullstride.llm.weights.dequantize import NUMBERS_AT_ONCE, dequantize
from fullstride.llm.weights.gguf_file import KINDS

PACKED = {kind.name: kind for kind in KINDS.values() if kind.numbers > 1}


def random_blocks(kind: str, rows: int, blocks: int, rng: np.random.Generator) -> np.ndarray:
    """Random bytes in which no scale is infinite or no number, but some of MXFP4's are subnormal."""
    data = rng.integers(0, 256, (rows, blocks, PACKED[kind].size), dtype=np.uint8)
    if kind == "MXFP4":
        data[:, :, 0] = rng.integers(0, 140, (rows, blocks))
        return data.reshape(rows, -1)
    elsewhere = {"Q6_K": [208], "Q2_K": [80, 82], "Q3_K": [108]}
    halves = elsewhere.get(kind, [0, 2] if kind in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else [0])
    for at in halves:
        scales = rng.normal(size=(rows, blocks)).astype(np.float16)
        data[:, :, at : at + 2] = scales[..., None].view(np.uint8)
    return data.reshape(rows, -1)


def theirs(kind: str, data: np.ndarray) -> np.ndarray:
    return gguf.dequantize(data, gguf.GGMLQuantizationType[kind])


@pytest.mark.parametrize("kind", PACKED)
def test_random_blocks_are_unpacked_to_the_last_bit(kind, seed):
    data = random_blocks(kind, 7, 5, np.random.default_rng(seed))
    ours = dequantize(PACKED[kind], data, np.dtype(np.float32))
    assert ours.std() > 1
    np.testing.assert_array_equal(ours, theirs(kind, data))


@pytest.mark.parametrize("kind", ["Q4_1", "Q6_K"])
def test_more_blocks_than_are_unpacked_at_once(kind):
    numbers = PACKED[kind].numbers
    data = random_blocks(kind, 3, NUMBERS_AT_ONCE // numbers - 5, np.random.default_rng(0))
    np.testing.assert_array_equal(dequantize(PACKED[kind], data, np.dtype(np.float32)), theirs(kind, data))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_what_is_packed_is_nearly_what_is_unpacked(kind, seed):
    values = np.random.default_rng(seed).normal(size=(5, 96)).astype(np.float32)
    data = quantize(values, gguf.GGMLQuantizationType[kind])
    error = np.abs(dequantize(PACKED[kind], data, np.dtype(np.float32)) - values).max()
    assert error < np.abs(values).max() / (100 if kind == "Q8_0" else 5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_dtypes_are_rounded_from_float32(dtype):
    data = random_blocks("Q4_K", 3, 2, np.random.default_rng(0))
    ours = dequantize(PACKED["Q4_K"], data, np.dtype(dtype))
    np.testing.assert_array_equal(ours, theirs("Q4_K", data).astype(np.dtype(dtype)))


def test_plain_floats_are_viewed():
    values = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    ours = dequantize(KINDS[0], values.view(np.uint8), np.dtype(np.float32))
    assert np.shares_memory(ours, values)
    np.testing.assert_array_equal(ours, values)
