"""Formats of packed weights, and the order in which their codes are in memory.

A number of a matrix is `scale * (code - zero) + minimum`. Numbers that are next to each other in a row form a group,
which shares scale and minimum; a record holds those of all groups of a block.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import UInt8

# Outputs and inputs of a tile, whose codes are next to each other as the fragments of mma.m16n8k16 want them.
TILE_OUTPUTS, TILE_INPUTS = 16, 128
# Numbers of a row whose codes are next to each other in the other order.
RUN = 32


class WeightFormat(NamedTuple):
    """Format of a packed matrix.

    Attributes:
        name: name in messages; GGUF's, or `fp8`, `fp8_N` and `int4_N` with N numbers in a group.
        bits: bits of a code.
        group: numbers that share a scale; 0 for a whole row.
        block: numbers whose scales are in one record; 0 for a whole row.
        record: bytes of a record.
        zero: code of the number 0 in a format without minima.
        minima: whether groups have a minimum, which is added.

    """

    name: str
    bits: int
    group: int
    block: int
    record: int
    zero: int = 0
    minima: bool = False


# Sizes of groups in AWQ and GPTQ checkpoints; 4-bit codes with a scale and the code of zero, both float16.
INT4_GROUPS = (32, 64, 128)
FORMATS = {
    each.name: each
    for each in (
        WeightFormat("Q4_0", 4, 32, 32, 2, zero=8),
        WeightFormat("Q4_1", 4, 32, 32, 4, minima=True),
        WeightFormat("Q8_0", 8, 32, 32, 2, zero=128),
        WeightFormat("Q4_K", 4, 32, 256, 16, minima=True),
        WeightFormat("Q6_K", 6, 16, 256, 18, zero=32),
        WeightFormat("fp8", 8, 0, 0, 4),
        WeightFormat("fp8_128", 8, 128, 128, 4),
        *(WeightFormat(f"int4_{size}", 4, size, size, 4, minima=True) for size in INT4_GROUPS),
    )
}


class CodedRows(NamedTuple):
    """Rows of a matrix on the host: a byte for each code, and their records."""

    format: str
    codes: UInt8[np.ndarray, "rows inputs"]
    records: UInt8[np.ndarray, "rows blocks bytes"]


def array_shapes(name: str, outputs: int, inputs: int, tiled: bool = False) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of a matrix's two arrays of bytes: codes and records."""
    form = FORMATS[name]
    blocks = inputs // form.block if form.block else 1
    if not tiled:
        return (outputs, inputs * form.bits // 8), (outputs, blocks, form.record)
    tiles = outputs // TILE_OUTPUTS
    each = TILE_OUTPUTS * TILE_INPUTS * form.bits // 8
    return (tiles, inputs // TILE_INPUTS, each), (tiles, blocks, TILE_OUTPUTS, form.record)


def can_tile(outputs: int, inputs: int) -> bool:
    """Return whether a matrix consists of whole tiles."""
    return outputs % TILE_OUTPUTS == 0 and inputs % TILE_INPUTS == 0


def arranged(rows: CodedRows, tiled: bool) -> tuple[UInt8[np.ndarray, "..."], UInt8[np.ndarray, "..."]]:
    """Return codes and records as they are in the device's memory; see `array_shapes`."""
    bits, outputs = FORMATS[rows.format].bits, len(rows.codes)
    if not tiled:
        return _RUNS[bits](rows.codes).reshape(outputs, -1), rows.records
    tiles = outputs // TILE_OUTPUTS
    records = rows.records.reshape(tiles, TILE_OUTPUTS, *rows.records.shape[1:]).swapaxes(1, 2)
    return _TILES[bits](rows.codes), np.ascontiguousarray(records)


def _pairs(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return low | high << np.uint8(4)


def _quarters(values: np.ndarray) -> np.ndarray:
    """Put four codes of two bits, the last axis, into a byte."""
    return np.bitwise_or.reduce(values << np.arange(0, 8, 2, dtype=np.uint8), axis=-1)


def _runs_4(codes: np.ndarray) -> np.ndarray:
    halves = codes.reshape(len(codes), -1, 2, RUN // 2)
    return _pairs(halves[:, :, 0], halves[:, :, 1])


def _runs_6(codes: np.ndarray) -> np.ndarray:
    high = (codes >> np.uint8(4)).reshape(len(codes), -1, 4, RUN // 4)
    return np.concatenate([_runs_4(codes & np.uint8(15)), _quarters(high.swapaxes(2, 3))], axis=-1)


def _fragments(codes: np.ndarray, steps: tuple[int, int], order: tuple[int, ...]) -> np.ndarray:
    """Split into tiles, and transpose: axes are tile, word's row half, row, step of 128 inputs, the two of `steps`,
    word's input half, thread of a row, number of a word.
    """
    outputs, inputs = codes.shape
    split = codes.reshape(outputs // 16, 2, 8, inputs // 128, *steps, 2, 4, 2)
    return split.transpose(order)


def _tiles_4(codes: np.ndarray) -> np.ndarray:
    found = _fragments(codes, (2, 4), (0, 3, 4, 2, 7, 5, 8, 6, 1))
    return _pairs(found[..., 0], found[..., 1]).reshape(*found.shape[:2], -1)


def _tiles_6(codes: np.ndarray) -> np.ndarray:
    found = _fragments(codes >> np.uint8(4), (4, 2), (0, 3, 2, 7, 4, 8, 5, 6, 1))
    high = _quarters(found.reshape(*found.shape[:7], 4)).reshape(*found.shape[:2], -1)
    return np.concatenate([_tiles_4(codes & np.uint8(15)), high], axis=-1)


def _tiles_8(codes: np.ndarray) -> np.ndarray:
    found = _fragments(codes, (4, 2), (0, 3, 4, 2, 7, 5, 6, 8, 1))
    return np.ascontiguousarray(found).reshape(*found.shape[:2], -1)


_RUNS = {4: _runs_4, 6: _runs_6, 8: np.ascontiguousarray}
_TILES = {4: _tiles_4, 6: _tiles_6, 8: _tiles_8}
