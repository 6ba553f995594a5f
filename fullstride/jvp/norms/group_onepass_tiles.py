"""Whole groups on the chip, the parts that GroupNorm's kernels of one reading are made of.

A tile is [pixels, lanes]: GROUPS groups side by side in the lanes, each padded from CPG channels to PAD of them, cut
into a tuple of pieces of as many pixels each. PACKED: half-precision tensors wait between the steps as they came, two
to a register, and each step converts them anew. A value of a group is a scalar if there is one group, else it stands
[1, lanes] in each lane of its group: both broadcast against a tile.
"""

from typing import no_type_check

import triton
import triton.language as tl

from fullstride.jvp.norms.sums import INTERPRETED, sums


@triton.jit
@no_type_check
def piece_at(i: tl.constexpr, channel, pixels, channels, PIECE: tl.constexpr, LAST: tl.constexpr):
    """The pixels of piece i [PIECE, 1], and where they lie in their sample; LAST: channels_last."""
    pixel = i * PIECE + tl.arange(0, PIECE)[:, None]
    return pixel, pixel * channels + channel if LAST else channel * pixels + pixel


@triton.jit
@no_type_check
def load_piece(x, i: tl.constexpr, channel, there, pixels, channels, PIECE: tl.constexpr, LAST: tl.constexpr,
               EXACT: tl.constexpr, MOVES=None):  # fmt: skip
    pixel, at = piece_at(i, channel, pixels, channels, PIECE, LAST)
    if EXACT:
        tile = tl.load(x + at) if MOVES is None else tl.load(x + at, mask=MOVES, other=0)
    else:
        inside = (pixel < pixels) & there
        tile = tl.load(x + at, mask=inside if MOVES is None else inside & MOVES, other=0)
    return tile


@triton.jit
@no_type_check
def load_tile(x, channel, there, pixels, channels, PIECES: tl.constexpr, PIECE: tl.constexpr, LAST: tl.constexpr,
              EXACT: tl.constexpr, MOVES=None):  # fmt: skip
    """A sample's tile as it lies in memory; zero where there is nothing. EXACT: there is nothing of that kind.

    MOVES, a condition, says whether there is the sample at all.
    """
    tiles = ()
    for i in tl.static_range(PIECES):
        tiles += (load_piece(x, i, channel, there, pixels, channels, PIECE, LAST, EXACT, MOVES),)
    return tiles


@triton.jit
@no_type_check
def store_piece(y, tile, i: tl.constexpr, channel, there, pixels, channels, PIECE: tl.constexpr, LAST: tl.constexpr,
                EXACT: tl.constexpr, MOVES=None):  # fmt: skip
    """Write piece i, if MOVES."""
    pixel, at = piece_at(i, channel, pixels, channels, PIECE, LAST)
    tile = tile.to(y.dtype.element_ty)
    if EXACT:
        if MOVES is None:
            tl.store(y + at, tile)
        else:
            tl.store(y + at, tile, mask=MOVES)
    else:
        inside = (pixel < pixels) & there
        tl.store(y + at, tile, mask=inside if MOVES is None else inside & MOVES)


@triton.jit
@no_type_check
def unpacked(tiles, i: tl.constexpr, STEP: tl.constexpr):
    """Piece i in fp32.

    Steps 1 and 2 convert half-precision anew, after an instruction that the compiler cannot see through: it takes a
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
def less(tile, mean, i: tl.constexpr, there, pixels, PIECE: tl.constexpr, EXACT: tl.constexpr):
    """Piece i less its group's mean, zero where there is nothing."""
    tile -= mean
    if not EXACT:
        pixel = i * PIECE + tl.arange(0, PIECE)[:, None]
        tile = tl.where((pixel < pixels) & there, tile, 0)
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
def totals(values, PAD: tl.constexpr, GROUPS: tl.constexpr):
    """Sums over each group's pixels and lanes, of pieces or of [1, lanes]; those of one thread first."""
    if GROUPS == 1:
        result = sums(values, None)
    else:
        split = ()
        for i in tl.static_range(len(values)):
            split += (tl.reshape(values[i], (values[i].shape[0], GROUPS, PAD)),)
        found = sums(sums(split, 2), 0)
        result = ()
        for i in tl.static_range(len(values)):
            spread = tl.broadcast_to(found[i][:, None], (GROUPS, PAD))
            result += (tl.reshape(spread, (1, GROUPS * PAD)),)
    return result
