"""Rows cut into pieces, the parts that the row kernels are made of.

A tile of ROWS rows is a tuple of [ROWS, WIDTH] pieces: 1152 takes nine pieces of 128, or five of 256, and not a padded
2048. Only the last one may reach beyond the row. A row whose pieces fit the lanes of one warp needs no barrier.
"""

from typing import no_type_check

import triton
import triton.language as tl

from fullstride.jvp.norms.sums import sums


@triton.jit
@no_type_check
def columns(i: tl.constexpr, WIDTH: tl.constexpr):
    """The columns of piece i, [1, WIDTH]."""
    return i * WIDTH + tl.arange(0, WIDTH)[None, :]


@triton.jit
@no_type_check
def load_piece(at, there, i: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr):
    col = columns(i, WIDTH)
    if (i + 1) * WIDTH > D:
        there = there & (col < D)
    return tl.load(at + col, mask=there, other=0).to(tl.float32)


@triton.jit
@no_type_check
def load_rows(at, there, D: tl.constexpr, WIDTH: tl.constexpr):
    """Rows that begin at `at` [ROWS, 1], in fp32; zero beyond them and unless `there`."""
    tiles = ()
    for i in tl.static_range((D + WIDTH - 1) // WIDTH):
        tiles += (load_piece(at, there, i, D, WIDTH),)
    return tiles


@triton.jit
@no_type_check
def load_parameter(at, batch, step, ROWS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr):
    """A batch's row of a parameter, in fp32, as ROWS equal rows: then each lane loads what it has of a tile itself."""
    at += batch.to(tl.int64) * step + 0 * tl.arange(0, ROWS)[:, None]
    return load_rows(at, True, D, WIDTH)


@triton.jit
@no_type_check
def store_piece(at, tile, there, i: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr):
    """Write piece i of rows that begin at `at` [ROWS, 1]."""
    col = columns(i, WIDTH)
    if (i + 1) * WIDTH > D:
        there = there & (col < D)
    tl.store(at + col, tile.to(at.dtype.element_ty), mask=there)


@triton.jit
@no_type_check
def less(tiles, column, D: tl.constexpr, WIDTH: tl.constexpr):
    """Rows less a value of each, zero beyond them."""
    result = ()
    for i in tl.static_range(len(tiles)):
        tile = tiles[i] - column
        if (i + 1) * WIDTH > D:
            tile = tl.where(columns(i, WIDTH) < D, tile, 0)
        result += (tile,)
    return result


@triton.jit
@no_type_check
def times(tiles, factor):
    """Rows times a value of each."""
    result = ()
    for i in tl.static_range(len(tiles)):
        result += (tiles[i] * factor,)
    return result


@triton.jit
@no_type_check
def summed(a):
    """The sum of the pieces."""
    total = a[0]
    for i in tl.static_range(1, len(a)):
        total += a[i]
    return total


@triton.jit
@no_type_check
def dot(a, b):
    """The sum over the pieces of a b."""
    total = a[0] * b[0]
    for i in tl.static_range(1, len(a)):
        total += a[i] * b[i]
    return total


@triton.jit
@no_type_check
def means(values, D: tl.constexpr):
    """Return the means of each row, as columns, from sums over the pieces."""
    found = sums(values, 1)
    result = ()
    for i in tl.static_range(len(found)):
        result += (found[i][:, None] / D,)
    return result
