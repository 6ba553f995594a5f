"""Packed formats against the gguf package's own dequantization, and against numbers by their definitions."""

from typing import Any

import gguf
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from fullstride.llm.packed import matrix as module
from fullstride.llm.packed.formats import FORMATS, CodedRows, arranged, array_shapes, can_tile
from fullstride.llm.packed.matrix import PackedMatrix, codes_of, numbers, product
from fullstride.llm.packed.quantize import MADE
from fullstride.llm.weights.packed_gguf import coded
from tests.llm.weights.test_dequantize import random_blocks

GGUF = ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K")


def packed(rows: CodedRows, tiled: bool) -> PackedMatrix:
    arrays = arranged(rows, tiled)
    outputs, inputs = rows.codes.shape
    assert tuple(array.shape for array in arrays) == array_shapes(rows.format, outputs, inputs, tiled)
    return PackedMatrix(jnp.asarray(arrays[0]), jnp.asarray(arrays[1]), rows.format)


def random_rows(form: str, outputs: int, inputs: int, rng: np.random.Generator) -> CodedRows:
    """Codes and records of any bits, but finite scales."""
    own = FORMATS[form]
    codes = rng.integers(0, 1 << own.bits, (outputs, inputs), dtype=np.uint8)
    blocks = inputs // own.block if own.block else 1
    if form.startswith("fp8"):
        codes = np.where(codes & 0x7F == 0x7F, 0, codes).astype(np.uint8)  # these two are no numbers
        return CodedRows(form, codes, rng.normal(size=(outputs, blocks, 1)).astype(np.float32).view(np.uint8))
    records = rng.integers(0, 256, (outputs, blocks, own.record), dtype=np.uint8)
    for at in {"Q6_K": [16]}.get(form, range(0, min(own.record, 4), 2)):
        records[..., at : at + 2] = rng.normal(size=(outputs, blocks, 1)).astype(np.float16).view(np.uint8)
    if form.startswith("int4"):
        records[..., 2:] = rng.integers(0, 17, (outputs, blocks, 1)).astype(np.float16).view(np.uint8)
    return CodedRows(form, codes, records)


@pytest.mark.parametrize("kind", GGUF)
def test_numbers_of_random_blocks_are_those_of_gguf(kind, seed):
    rng = np.random.default_rng(seed)
    data = random_blocks(kind, 48, 2 if kind.endswith("_K") else 12, rng)
    rows = coded(kind, data)
    assert rows is not None
    expected = gguf.dequantize(data, gguf.GGMLQuantizationType[kind])
    for tiled in (False, True):
        made = packed(rows, tiled)
        assert made.nbytes == data.nbytes
        np.testing.assert_array_equal(codes_of(made), rows.codes)
        found = np.asarray(jax.jit(numbers, static_argnums=1)(made, jnp.float32))
        # A product and a sum may be rounded once.
        np.testing.assert_allclose(found, expected, rtol=0, atol=2**-22 * np.abs(expected).max())
        chosen = rng.integers(0, 48, 7)
        np.testing.assert_array_equal(made.rows(jnp.asarray(chosen), jnp.float32), numbers(made, jnp.float32)[chosen])


def test_what_gguf_has_besides_has_no_packed_format(seed):
    assert coded("Q5_K", random_blocks("Q5_K", 2, 1, np.random.default_rng(seed))) is None


@pytest.mark.parametrize("form", ["int4_32", "int4_128", "fp8", "fp8_128"])
def test_other_numbers_are_those_of_their_definitions(form, seed):
    rows = random_rows(form, 32, 256, np.random.default_rng(seed))
    if form.startswith("fp8"):
        scales = np.repeat(rows.records.view(np.float32)[..., 0], 256 // rows.records.shape[1], 1)
        expected = rows.codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64) * scales
    else:
        scales, zeros = np.moveaxis(rows.records.view(np.float16).astype(np.float64), -1, 0)
        groups = rows.codes.reshape(*scales.shape, -1)
        expected = ((groups - zeros[..., None]) * scales[..., None]).reshape(32, 256)
    for tiled in (False, True):
        np.testing.assert_allclose(numbers(packed(rows, tiled), jnp.float32), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("form", ["Q4_K", "Q8_0", "int4_128"])
def test_products_are_those_of_the_numbers(form, tiled, seed, monkeypatch):
    """Whole, and in parts that the outputs are no multiple of."""
    rng = np.random.default_rng(seed)
    made = packed(random_rows(form, 112, 256, rng), tiled)
    x = rng.standard_normal((5, 256)).astype(np.float32)
    expected = x.astype(np.float64) @ np.asarray(numbers(made, jnp.float32), np.float64).T
    for at_once in (1 << 24, 48 * 256):
        monkeypatch.setattr(module, "AT_ONCE", at_once)
        found = product(jnp.asarray(x), made, jnp.float32)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


# Of the largest number of a group that shares a scale: half a code, and its scale's own rounding.
HALF = {"fp8": 2**-4, "int8": 0.51 / 127, "int4": 0.51 * 2 / 15}


@pytest.mark.parametrize("kind", MADE)
def test_made_formats_are_off_by_half_a_code(kind, seed):
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((48, 160)).astype(np.float32) * rng.uniform(0.1, 30, (48, 1)).astype(np.float32)
    values[3] = 0
    made: Any = packed(MADE[kind](values), False)
    found = np.asarray(numbers(made, jnp.float32))
    groups = values.reshape(48, 1, -1) if kind == "fp8" else values.reshape(48, -1, 32)
    error = np.abs(found - values).reshape(groups.shape)
    relative = np.abs(groups) if kind == "fp8" else np.abs(groups).max(-1, keepdims=True)
    assert (error <= HALF[kind] * relative + 2**-9 * np.abs(groups).max(-1, keepdims=True) / 448 + 1e-30).all()
    assert error.max() > 0
    assert not found[3].any()


def test_tiles_are_of_whole_outputs_and_inputs():
    assert can_tile(48, 256)
    assert not can_tile(40, 256)
    assert not can_tile(48, 192)
