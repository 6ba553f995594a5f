"""Whole groups on the chip, the parts that GroupNorm's kernels of one reading are made of.

A tile is that of `group_tiles`, cut into a tuple of pieces of as many pixels each. Packed half-precision tensors wait
between the steps as they came, two to a register, and each step converts them anew.
"""

from typing import no_type_check

import triton
import triton.language as tl

from fullstride.jvp.norms.group_tiles import positions
from fullstride.jvp.norms.sums import INTERPRETED, sums


@triton.jit
@no_type_check
def load_piece(x, i: tl.constexpr, lane, sizes, T: tl.constexpr, MOVES=None):
    pixel = i * T.pixels + tl.arange(0, T.pixels)[:, None]
    at = positions(pixel, lane[0], sizes, T)
    if T.exact:
        tile = tl.load(x + at) if MOVES is None else tl.load(x + at, mask=MOVES, other=0)
    else:
        inside = (pixel < sizes[2]) & lane[2]
        tile = tl.load(x + at, mask=inside if MOVES is None else inside & MOVES, other=0)
    return tile


@triton.jit
@no_type_check
def load_tile(x, lane, sizes, T: tl.constexpr, MOVES=None):
    """A sample's tile as it lies in memory; zero where there is nothing.

    MOVES, a condition, says whether there is the sample at all.
    """
    PIECES: tl.constexpr = T.pieces
    tiles = ()
    for i in tl.static_range(PIECES):
        tiles += (load_piece(x, i, lane, sizes, T, MOVES),)
    return tiles


@triton.jit
@no_type_check
def store_piece(y, tile, i: tl.constexpr, lane, sizes, T: tl.constexpr, MOVES=None):
    """Write piece i, if MOVES."""
    pixel = i * T.pixels + tl.arange(0, T.pixels)[:, None]
    at = positions(pixel, lane[0], sizes, T)
    tile = tile.to(y.dtype.element_ty)
    if T.exact:
        if MOVES is None:
            tl.store(y + at, tile)
        else:
            tl.store(y + at, tile, mask=MOVES)
    else:
        inside = (pixel < sizes[2]) & lane[2]
        tl.store(y + at, tile, mask=inside if MOVES is None else inside & MOVES)


@triton.jit
@no_type_check
def unpacked(tiles, i: tl.constexpr, STEP: tl.constexpr):
    """Piece i in fp32.

    Steps 1 and 2 convert 16-bit values again, after an instruction that the compiler cannot see through: it takes a
    coordinate of the program that is always zero. Step 0 is plain.
    """
    tile = tiles[i]
    if STEP > 0 and not INTERPRETED and tile.dtype.primitive_bitwidth == 16:
        if STEP == 1:
            tile = tl.inline_asm_elementwise(
                "{ .reg .b32 z; mov.u32 z, %ctaid.y; xor.b32 $0, $1, z; }", "=r,r", [tile], tile.dtype, True, 2
            )
        else:
            tile = tl.inline_asm_elementwise(
                "{ .reg .b32 z; mov.u32 z, %ctaid.z; xor.b32 $0, $1, z; }", "=r,r", [tile], tile.dtype, True, 2
            )
    return tile.to(tl.float32)


@triton.jit
@no_type_check
def less(tile, mean, i: tl.constexpr, lane, sizes, T: tl.constexpr):
    """Piece i less its group's mean, zero where there is nothing."""
    tile -= mean
    if not T.exact:
        pixel = i * T.pixels + tl.arange(0, T.pixels)[:, None]
        tile = tl.where((pixel < sizes[2]) & lane[2], tile, 0)
    return tile


@triton.jit
@no_type_check
def over_pixels(values):
    """Sums over the pixels, [1, lanes]."""
    found = sums(values, 0)
    result = ()
    for i in tl.static_range(len(found)):
        result += (found[i][None, :],)
    return result


@triton.jit
@no_type_check
def totals(values, T: tl.constexpr):
    """Sums over each group's pixels and lanes, of pieces or of [1, lanes]; those of one thread first."""
    if T.groups == 1:
        result = sums(values, None)
    else:
        split = ()
        for i in tl.static_range(len(values)):
            split += (tl.reshape(values[i], (values[i].shape[0], T.groups, T.pad)),)
        found = sums(sums(split, 2), 0)
        result = ()
        for i in tl.static_range(len(values)):
            spread = tl.broadcast_to(found[i][:, None], (T.groups, T.pad))
            result += (tl.reshape(spread, (1, T.groups * T.pad)),)
    return result
