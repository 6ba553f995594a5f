"""Packed weights of `benchmarks llm`: parameters as files pack them, without files, and the numbers that they hold."""

import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from benchmarks.cases.llm.work import DRAWN, TiledParameters
from fullstride.llm.config import ModelConfig, parameter_shapes
from fullstride.llm.models.packing import MATRICES, PackedReader, Packing
from fullstride.llm.models.tensor_parallel import ShardReader
from fullstride.llm.packed.formats import FORMATS, CodedRows
from fullstride.llm.packed.matrix import PackedMatrix, numbers

# Standard deviations of the codes 0 to 15 and 0 to 63, and of the weights that they make.
SPREAD_4, SPREAD_6, WEIGHTS = 4.61, 18.47, 0.03
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
        record = _record_6() if form == "Q6_K" else _record_4()
        blocks = codes.shape[1] // FORMATS[form].block
        return CodedRows(form, codes, np.broadcast_to(record, (len(codes), blocks, len(record))))


def _record_4() -> np.ndarray:
    scale = WEIGHTS / SPREAD_4 / SCALE
    halves = np.array([scale, scale * 7.5 * SCALE / MINIMUM], np.float16).view(np.uint8)
    low = [(SCALE & 15) * 17] * 4 + [(MINIMUM & 15) * 17] * 4
    high = [(SCALE >> 4) * 85] * 2 + [(MINIMUM >> 4) * 85] * 2
    return np.concatenate([halves, np.array(low + high, np.uint8)])


def _record_6() -> np.ndarray:
    half = np.array([WEIGHTS / SPREAD_6 / SCALE], np.float16).view(np.uint8)
    return np.concatenate([np.full(16, SCALE, np.uint8), half])


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
