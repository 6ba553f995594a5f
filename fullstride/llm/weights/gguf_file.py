"""GGUF container: metadata and tensors of one memory-mapped file.

Read here and not by the `gguf` package, which takes seconds for a vocabulary because it makes an array of each text.
The format is specified in ggml's docs/gguf.md.
"""

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fullstride.errors import ConfigError

VERSIONS = (2, 3)
STRING, ARRAY, BOOL = 8, 9, 7
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", BOOL: "?", 10: "Q", 11: "q", 12: "d"}
MOST_DIMENSIONS = 4


class PackedFormat(NamedTuple):
    """Packing of numbers: numbers per block, and bytes per block."""

    name: str
    numbers: int
    size: int


KINDS = {
    0: PackedFormat("F32", 1, 4),
    1: PackedFormat("F16", 1, 2),
    2: PackedFormat("Q4_0", 32, 18),
    3: PackedFormat("Q4_1", 32, 20),
    6: PackedFormat("Q5_0", 32, 22),
    7: PackedFormat("Q5_1", 32, 24),
    8: PackedFormat("Q8_0", 32, 34),
    10: PackedFormat("Q2_K", 256, 84),
    11: PackedFormat("Q3_K", 256, 110),
    12: PackedFormat("Q4_K", 256, 144),
    13: PackedFormat("Q5_K", 256, 176),
    14: PackedFormat("Q6_K", 256, 210),
    20: PackedFormat("IQ4_NL", 32, 18),
    23: PackedFormat("IQ4_XS", 256, 136),
    30: PackedFormat("BF16", 1, 2),
    39: PackedFormat("MXFP4", 32, 17),
}

# Type names by ggml's numbers, for messages only.
NOT_SUPPORTED = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S",
    24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0",
    40: "NVFP4", 41: "Q1_0",
}  # fmt: skip


@dataclass(frozen=True)
class PackedTensor:
    """Tensor as stored in the file; its shape has the slowest axis first, as in NumPy."""

    name: str
    kind: PackedFormat
    shape: tuple[int, ...]
    data: np.ndarray


@dataclass(frozen=True)
class GgufFile:
    """Metadata and tensors of a GGUF file."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, PackedTensor]


def open_gguf(path: Path) -> GgufFile:
    """Read the metadata and map the tensors.

    Raises:
        ConfigError: if the file is no GGUF, damaged, cut short, or has tensors of a kind that is not supported.

    """
    data = np.memmap(path, mode="r") if path.stat().st_size else np.zeros(0, np.uint8)
    try:
        return _parse(path, np.asarray(data))
    except (struct.error, IndexError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: damaged or cut short within its header ({len(data)} bytes)") from error


def _parse(path: Path, data: np.ndarray) -> GgufFile:
    if data[:4].tobytes() != b"GGUF":
        raise ConfigError(f"{path}: not a GGUF file")
    cursor = _Cursor(data, 4)
    version = cursor.number("I")
    if version not in VERSIONS:
        raise ConfigError(f"{path}: GGUF version {version}; expected one of {VERSIONS}, little-endian")
    tensors, pairs = cursor.number("Q"), cursor.number("Q")
    metadata = {cursor.text(): cursor.value(cursor.number("I")) for _ in range(pairs)}
    entries = [_entry(cursor) for _ in range(tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ConfigError(f"{path}: general.alignment={alignment}: expected a positive whole number")
    start = math.ceil(cursor.at / alignment) * alignment
    packed = {entry[0]: _packed(path, data, start, *entry) for entry in entries}
    if len(packed) < tensors or len(metadata) < pairs:
        raise ConfigError(f"{path}: damaged: a tensor or a key occurs twice")
    return GgufFile(path, metadata, packed)


class _Cursor:
    """Sequential reader of values; reading past the end raises."""

    def __init__(self, data: np.ndarray, at: int):
        self.view, self.at = data.data, at

    def numbers(self, form: str) -> list[Any]:
        values = struct.unpack_from(f"<{form}", self.view, self.at)
        self.at += struct.calcsize(f"<{form}")
        return list(values)

    def number(self, form: str) -> Any:
        return self.numbers(form)[0]

    def text(self) -> str:
        return self.texts(1)[0]

    def texts(self, count: int) -> list[str]:
        """Vocabularies have hundreds of thousands of them: one loop without calls."""
        view, at, end, size_at = self.view, self.at, len(self.view), struct.Struct("<Q").unpack_from
        texts = []
        for _ in range(count):
            start = at + 8
            at = start + size_at(view, at)[0]
            if at > end:
                raise IndexError(at)
            texts.append(str(view[start:at], "utf-8"))
        self.at = at
        return texts

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.text()
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind != ARRAY:
            raise IndexError(kind)
        kind, count = self.number("I"), self.number("Q")
        # Each item takes at least a byte: a corrupt count must not exhaust the memory.
        if count > len(self.view) - self.at:
            raise IndexError(count)
        if kind == STRING:
            return self.texts(count)
        return self.numbers(f"{count}{SCALARS[kind]}") if kind in SCALARS else [self.value(kind) for _ in range(count)]


def _entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name, dimensions = cursor.text(), cursor.number("I")
    if dimensions > MOST_DIMENSIONS:
        raise IndexError(dimensions)
    shape = tuple(reversed([cursor.number("Q") for _ in range(dimensions)]))
    return name, shape, cursor.number("I"), cursor.number("Q")


def _packed(
    path: Path, data: np.ndarray, start: int, name: str, shape: tuple[int, ...], kind: int, at: int
) -> PackedTensor:
    if kind not in KINDS:
        supported = ", ".join(known.name for known in KINDS.values())
        found = NOT_SUPPORTED.get(kind, f"number {kind}, which this version does not know")
        raise ConfigError(
            f"{path}: {name} is of GGUF type {found}; supported are {supported}: use a file of one of these types"
        )
    packing = KINDS[kind]
    width = shape[-1] if shape else 1
    if width % packing.numbers or 0 in shape:
        raise ConfigError(f"{path}: damaged: {name} of {list(shape)} does not consist of whole rows of {packing.name}")
    size = math.prod(shape) // packing.numbers * packing.size
    if start + at + size > len(data):
        raise ConfigError(f"{path}: cut short: {name} ends at byte {start + at + size}, but the file has {len(data)}")
    row = width // packing.numbers * packing.size
    return PackedTensor(name, packing, shape, data[start + at : start + at + size].reshape(-1, row))
