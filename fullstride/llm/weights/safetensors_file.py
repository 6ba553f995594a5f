"""Memory-mapped safetensors files: a tensor is a view of the file, whose bytes are read on first use."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fullstride.errors import ConfigError
from fullstride.llm.weights.parameters import PLAIN, Values

# The format's own limit on its header.
MOST_HEADER = 100_000_000
# A parameter has one or two; a tensor that is none is named as such.
MOST_DIMENSIONS = 8


@dataclass(frozen=True)
class MappedTensor:
    """A tensor in a mapped file; its kind is the format's name of its dtype."""

    values: np.ndarray
    kind: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return self.values.shape

    def read(self, rows: slice, columns: slice, dtype: np.dtype) -> Values:
        """A part: a view, if it is of this dtype."""
        part = self.values[rows] if self.values.ndim == 1 else self.values[rows, columns]
        return part.astype(dtype, copy=False)


def open_safetensors(file: Path, packed: Mapping[str, str] | None = None) -> dict[str, MappedTensor]:
    """Map all tensors of a file, by name; they may be of floats, and of the kinds `packed`, which have these dtypes.

    Raises:
        ConfigError: if the file is damaged or cut short, or a tensor is not of floats.

    """
    data = np.memmap(file, mode="r") if file.stat().st_size else np.zeros(0, np.uint8)
    header, start = _header(file, data)
    return {
        name: MappedTensor(
            _tensor(file, np.asarray(data)[start:], name, entry, PLAIN | dict(packed or {})), entry["dtype"]
        )
        for name, entry in header.items()
        if name != "__metadata__"
    }


def _header(file: Path, data: np.ndarray) -> tuple[dict[str, Any], int]:
    size = int.from_bytes(data[:8].tobytes(), "little")
    if len(data) < 8 or size > min(MOST_HEADER, len(data) - 8):
        raise ConfigError(f"{file}: not safetensors, or cut short within its header ({len(data)} bytes)")
    try:
        header = json.loads(data[8 : 8 + size].tobytes())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: not safetensors: its header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise ConfigError(f"{file}: not safetensors: its header is not a JSON object")
    return header, 8 + size


def _tensor(file: Path, data: np.ndarray, name: str, entry: Any, kinds: Mapping[str, str]) -> np.ndarray:
    try:
        kind, shape = str(entry["dtype"]), tuple(entry["shape"])
        start, stop = entry["data_offsets"]
        if not all(type(number) is int for number in (*shape, start, stop)) or len(shape) > MOST_DIMENSIONS:
            raise ValueError(shape)
    except (TypeError, KeyError, ValueError) as error:
        raise ConfigError(f"{file}: not safetensors: its header has an invalid entry for {name}") from error
    if kind not in kinds:
        raise ConfigError(f"{file}: {name} is of {kind}; supported are {', '.join(kinds)}, not quantized weights")
    dtype = np.dtype(kinds[kind])
    if stop > len(data):
        raise ConfigError(f"{file}: cut short: {name} ends at byte {stop}, but the file has {len(data)}")
    if not 0 <= start <= stop or min(shape, default=0) < 0 or stop - start != math.prod(shape) * dtype.itemsize:
        raise ConfigError(f"{file}: damaged: {name} of {kind}{list(shape)} cannot be bytes {start} to {stop}")
    return data[start:stop].view(dtype).reshape(shape)
