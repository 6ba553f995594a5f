"""Packed matrices of a model: read or made, arranged for the kernels, and put on the devices."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from math import prod
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Array

from fullstride.device.select import cores
from fullstride.errors import ConfigError
from fullstride.llm.config import ModelConfig, parameter_shapes
from fullstride.llm.models.tensor_parallel import INPUTS, OUTPUTS, ShardReader
from fullstride.llm.packed.formats import TILE_OUTPUTS, CodedRows, arranged, array_shapes, can_tile
from fullstride.llm.packed.matrix import JoinedMatrix, PackedMatrix, Weight
from fullstride.llm.packed.quantize import GROUP, MADE

# Weights as their file packs them.
STORED = "stored"
# Matrices of the vocabulary, whose errors are those of every logit: `int4` has 8 bits for them.
VOCABULARY = ("embed", "head")
# Numbers of a matrix that a thread packs at once.
AT_ONCE = 1 << 20
MATRICES = frozenset(name for name in OUTPUTS | INPUTS if not name.endswith("bias"))


class Packing(NamedTuple):
    """How matrices are packed: `stored` or a name of `MADE`; and whether in tiles, for kernels that read those."""

    name: str
    tiled: bool = False


@runtime_checkable
class CodedReading(Protocol):
    """Protocol of parameters that can be read as codes, such as `fullstride.llm.weights.Parameters`."""

    def codes(self, name: str, rows: slice | None = None, columns: slice | None = None) -> CodedRows | None: ...


class PackedReader:
    """Reader of packed matrices; what is not packed is read as by `ShardReader`."""

    def __init__(self, reader: ShardReader, parameters: Mapping[str, np.ndarray], packing: Packing):
        """Read what `reader` reads, packed."""
        self._reader = reader
        self._parameters = parameters
        self._packing = packing

    def place(self, *names: str) -> Array | Weight:
        """Parameters, one below the other in each device's share, on the devices.

        Raises:
            ConfigError: as `ShardReader.place`, or if a share is not of whole blocks.

        """
        short = names[0].rpartition(".")[2]
        if short not in MATRICES:
            return self._reader.place(*names)
        shares = [self._share(names, index, device) for index, device in enumerate(self._reader.devices)]
        axis = 1 if short in INPUTS else 0
        made = jax.tree.map(lambda *parts: self._reader.joined(parts, axis), *shares)
        return made[0] if len(made) == 1 else JoinedMatrix(made)

    def _share(self, names: tuple[str, ...], index: int, device: Any) -> tuple[PackedMatrix | Array, ...]:
        """Return one device's share; parameters of the same format that follow each other are one matrix."""
        found = [(name, self._codes(name, index)) for name in names]
        parts = []
        for form, own in groupby(found, key=lambda pair: None if pair[1] is None else pair[1].format):
            group = list(own)
            if form is None:
                parts.append(self._reader.put({name: self._reader.part(name, index) for name, _ in group}, device))
            else:
                parts.append(self._matrix([rows for _, rows in group if rows is not None], device))
        return tuple(parts)

    def _codes(self, name: str, index: int) -> CodedRows | None:
        if self._packing.name == STORED:
            own, missing = self._reader.slices(name, index)
            found = self._parameters.codes(name, **own) if isinstance(self._parameters, CodedReading) else None
            return found if found is None or not missing else _padded(found, missing)
        values = np.asarray(self._reader.part(name, index))
        kind = "int8" if self._packing.name == "int4" and name in VOCABULARY else self._packing.name
        if kind != "fp8" and values.shape[1] % GROUP:
            width = f"{name} has {values.shape[1]} inputs on a device"
            raise ConfigError(f"quantize={self._packing.name}: {width}, expected a multiple of {GROUP}; take fp8")
        if not np.isfinite(values).all():
            raise ConfigError(
                f"quantize={self._packing.name}: {name} has values that are not finite; set quantize=none"
            )
        return _concatenated(_by_rows(lambda part: MADE[kind](values[part]), *values.shape))

    def _matrix(self, parts: list[CodedRows], device: Any) -> PackedMatrix:
        form, codes, records = _concatenated(parts)
        tiled = self._packing.tiled and can_tile(*codes.shape)
        made = _by_rows(lambda part: arranged(CodedRows(form, codes[part], records[part]), tiled), *codes.shape)
        first, second = (jax.device_put(np.concatenate(each), device) for each in zip(*made, strict=True))
        return PackedMatrix(first, second, form)


def _by_rows(call: Callable[[slice], Any], rows: int, inputs: int) -> list[Any]:
    """Return the results for parts of the rows, whole tiles of them, computed by several threads."""
    step = max(1, AT_ONCE // inputs // TILE_OUTPUTS) * TILE_OUTPUTS
    parts = [slice(start, start + step) for start in range(0, rows, step)]
    with ThreadPoolExecutor(min(cores(), len(parts))) as pool:
        return list(pool.map(call, parts))


def _concatenated(parts: list[CodedRows]) -> CodedRows:
    if len(parts) == 1:
        return parts[0]
    codes, records = (np.concatenate([part[i] for part in parts]) for i in (1, 2))
    return CodedRows(parts[0].format, codes, records)


def _padded(rows: CodedRows, missing: int) -> CodedRows:
    """Append rows whose records, of zeros, make zeros of any code."""
    codes, records = (np.pad(each, [(0, missing)] + [(0, 0)] * (each.ndim - 1)) for each in rows[1:])
    return CodedRows(rows.format, codes, records)


def refusal(config: ModelConfig, dtype: str, name: str) -> str | None:
    """Return why a model cannot have packed weights, or None if it can."""
    if config.experts:
        return f"quantize={name}: matrices of a mixture of experts cannot be packed; set quantize=none"
    if dtype == "float16":
        return f"quantize={name} with dtype=float16: expected bfloat16 or float32, which hold every packed number"
    return None


def weight_bytes(config: ModelConfig, dtype: str, format_of: Callable[[str], str | None]) -> int:
    """Return the bytes of a model's weights on the devices.

    Args:
        config: sizes of the model.
        dtype: dtype of what is not packed.
        format_of: name of the format of a parameter, or None if it is not packed.

    """
    total = 0
    for name, shape in parameter_shapes(config).items():
        form = format_of(name) if name.rpartition(".")[2] in MATRICES else None
        if form is None or len(shape) != 2:
            total += prod(shape) * np.dtype(dtype).itemsize
        else:
            total += sum(map(prod, array_shapes(form, *shape)))
    return total
