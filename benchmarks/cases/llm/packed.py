"""Packed weights of `benchmarks llm` and `llm-products`: as files pack them, without files, and their numbers."""

import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.cases.llm.work import DRAWN, TiledParameters
from fullstride.llm.config import ModelConfig, parameter_shapes
from fullstride.llm.models.packing import MATRICES, PackedReader, Packing
from fullstride.llm.models.tensor_parallel import ShardReader
from fullstride.llm.packed.formats import FORMATS, CodedRows, array_shapes
from fullstride.llm.packed.matrix import PackedMatrix, numbers

# Standard deviations of codes by their bits, of the numbers of e4m3, and of the weights that they make.
SPREADS, SPREAD_E4M3, WEIGHTS = {4: 4.61, 6: 18.47, 8: 73.9}, 100.0, 0.03
LARGEST_E4M3 = 0x70  # without those so large that one of them decides a sum, and NaN
# Codes of six bits of a scale and a minimum, the latter 7.5 times the former, in Q4_K's records.
SCALE, MINIMUM = 32, 60


class StoredParameters(TiledParameters):
    """Random parameters packed as many GGUF files are: Q4_K, and Q6_K for the vocabulary."""

    def __init__(self, config: ModelConfig, dtype: str):
        super().__init__(config, dtype)
        drawn = np.random.default_rng(0).integers(0, 64, DRAWN, np.uint8)
        self._codes = np.concatenate([drawn, drawn])

    def packed_as(self, name: str) -> str | None:
        """Return the format of a matrix, or None for a vector."""
        short = name.rpartition(".")[2]
        return None if short not in MATRICES else "Q6_K" if short in ("embed", "head") else "Q4_K"

    def codes(self, name: str, rows: slice | None = None, columns: slice | None = None) -> CodedRows | None:
        """Return a part of a matrix, as `fullstride.llm.weights.Parameters` does."""
        if (form := self.packed_as(name)) is None:
            return None
        height, width = self._shapes[name]
        start, stop, _ = (rows or slice(None)).indices(height)
        first = (zlib.crc32(name.encode()) + start * width) % DRAWN
        codes = np.resize(self._codes[first : first + DRAWN], (stop - start, width))[:, columns or slice(None)]
        codes = codes if form == "Q6_K" else codes & np.uint8(15)
        record = record_of(form)
        blocks = codes.shape[1] // FORMATS[form].block
        return CodedRows(form, codes, np.broadcast_to(record, (len(codes), blocks, len(record))))


def record_of(form: str, spread: float = WEIGHTS) -> np.ndarray:
    """Return the record of a block whose weights, if its codes are any at random, have this standard deviation."""
    scale = spread / SPREADS[FORMATS[form].bits]
    if form == "Q4_K":
        low = [(SCALE & 15) * 17] * 4 + [(MINIMUM & 15) * 17] * 4
        high = [(SCALE >> 4) * 85] * 2 + [(MINIMUM >> 4) * 85] * 2
        return np.concatenate([_halves(scale / SCALE, scale * 7.5 / MINIMUM), np.array(low + high, np.uint8)])
    if form == "Q6_K":
        return np.concatenate([np.full(16, SCALE, np.uint8), _halves(scale / SCALE)])
    if form.startswith("fp8"):
        return np.array([spread / SPREAD_E4M3], np.float32).view(np.uint8)
    second = (-7.5 * scale,) if form == "Q4_1" else (8.0,) if form.startswith("int4") else ()
    return _halves(scale, *second)


def _halves(*values: float) -> np.ndarray:
    return np.array(values, np.float16).view(np.uint8)


def random_matrix(form: str, outputs: int, inputs: int, key: jax.Array, *, tiled: bool) -> PackedMatrix:
    """Draw a matrix on the device; its blocks have different scales."""
    of_codes, of_records = jax.random.split(key)
    codes, records = array_shapes(form, outputs, inputs, tiled)
    bits = jax.random.bits(of_codes, codes, "uint8")
    if form.startswith("fp8"):
        bits = jnp.where(bits & 0x7F > LARGEST_E4M3, bits & 0x8F, bits)
    drawn = jnp.asarray([record_of(form, WEIGHTS * factor) for factor in (0.5, 1.0, 1.5)])
    return PackedMatrix(bits, drawn[jax.random.randint(of_records, records[:-1], 0, 3)], form)


class PackedNumbers(Mapping[str, Any]):
    """Parameters as the numbers that an engine with packed weights computes with."""

    def __init__(self, config: ModelConfig, parameters: Mapping[str, Any], dtype: str, quantize: str):
        reader = ShardReader(config, parameters, dtype, jax.devices()[:1])
        self._names, self._dtype = tuple(parameter_shapes(config)), dtype
        self._reader = PackedReader(reader, parameters, Packing(quantize))

    def __getitem__(self, name: str) -> Any:
        found = self._reader.place(name)
        return numbers(found, self._dtype) if isinstance(found, PackedMatrix) else found

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
