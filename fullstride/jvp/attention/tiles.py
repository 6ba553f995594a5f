"""Pieces of Triton that the attention kernels share: tiles of rows, products of tiles, which keys a query sees.

A head dim that is no power of two is cut into two pieces, 80 = 64 + 16, rather than padded to the next one, 128; a tile
of rows is then a tuple of two tiles, and a product of rows the sum of two. Kernels carry `no_type_check` because a
type checker's import hook must not wrap them: Triton reads their source and their module's globals.
"""

from typing import Any, NamedTuple, no_type_check

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# A mask that adds the lowest finite number must not become -inf when it is turned into units of log 2.
LOWEST = tl.constexpr(-2e38)


def pieces(dim: int) -> tuple[int, int, int]:
    """A head dim and the widths that hold it: (80, 64, 16), (64, 64, 0), (72, 64, 16), (112, 128, 0)."""
    whole = max(16, 1 << (dim - 1).bit_length())
    main = max(16, 1 << (dim.bit_length() - 1))
    tail = 0 if dim <= main else max(16, 1 << (dim - main - 1).bit_length())
    return (dim, main, tail) if main + tail < whole else (dim, whole, 0)


class Tiling(NamedTuple):
    """The constants of an attention kernel.

    Attributes:
        qk: the head dim of q and k and the widths that hold it, as `pieces` gives them.
        v: the head dim of v and its widths, as in `qk`.
        block_m: number of queries per block.
        block_n: number of keys per block.
        stages: number of iterations whose loads are in flight.
        tma: whether inputs are descriptors of tiles, which the tensor memory accelerator copies; else pointers.
        edge: whether every block may be cut by a mask or an end; else only those that `key_ranges` names.
        left: whether the window has a limit to its left.
        right: whether it has one to its right.
        precision: format of fp32 products.
        index: integer type of the offsets within a tile.
        step: common divisor of the outer strides.
        early: whether the forward's products of the tangent of the scores are issued before the exponentials.
        parts: columns of which the backward's products of rows are summed, or 0 for whole rows at once.

    """

    qk: tuple[int, int, int]
    v: tuple[int, int, int]
    block_m: int
    block_n: int
    stages: int
    tma: bool
    edge: bool
    left: bool
    right: bool
    precision: str
    index: Any
    step: int
    early: bool = True
    parts: int = 0


@triton.jit
@no_type_check
def aligned(strides, COUNT: tl.constexpr, STEP: tl.constexpr):
    """The first COUNT strides, multiples of STEP, in a form that says so.

    Rows of 72 are else read two bytes at a time.
    """
    result = ()
    for i in tl.static_range(COUNT):
        b, h, row, column = strides[i]
        result += ((b // STEP * STEP, h // STEP * STEP, row // STEP * STEP, column),)
    return result


@triton.jit
@no_type_check
def place_of(operand, head, first):
    """Return the address of a head's row `first`; an operand is a pointer and its strides."""
    x, strides = operand
    at = x + tl.cast(head[0], tl.int64) * strides[0] + tl.cast(head[1], tl.int64) * strides[1]
    return at + tl.cast(first, tl.int64) * strides[2]


@triton.jit
@no_type_check
def load_piece(operand, head, first, end, DIM: tl.constexpr, OFFSET: tl.constexpr, WIDTH: tl.constexpr,
               ROWS: tl.constexpr, EDGE: tl.constexpr, C: tl.constexpr):  # fmt: skip
    x, strides = operand
    if C.tma:
        tile = x.load([head[0], head[1], first, OFFSET]).reshape(ROWS, WIDTH)
    else:
        rows = tl.arange(0, ROWS)[:, None]
        cols = OFFSET + tl.arange(0, WIDTH)[None, :]
        place = place_of(operand, head, first) + (rows.to(C.index) * strides[2] + cols.to(C.index) * strides[3])
        if EDGE and OFFSET + WIDTH > DIM:
            tile = tl.load(place, mask=(rows < end - first) & (cols < DIM), other=0.0)
        elif EDGE:
            tile = tl.load(place, mask=rows < end - first, other=0.0)
        elif OFFSET + WIDTH > DIM:
            tile = tl.load(place, mask=cols < DIM, other=0.0)
        else:
            tile = tl.load(place)
    return tile


@triton.jit
@no_type_check
def load_rows(operand, head, first, end, DIMS: tl.constexpr, ROWS: tl.constexpr, EDGE: tl.constexpr, C: tl.constexpr):
    """Rows first, ..., first + ROWS - 1 of a head, in pieces; zeros from row `end` on (if EDGE) and past the dim."""
    main = load_piece(operand, head, first, end, DIMS[0], 0, DIMS[1], ROWS, EDGE, C)
    tiles = (main,)
    if DIMS[2] > 0:
        tiles = (main, load_piece(operand, head, first, end, DIMS[0], DIMS[1], DIMS[2], ROWS, EDGE, C))
    return tiles


@triton.jit
@no_type_check
def store_rows(operand, head, first, end, values, DIMS: tl.constexpr, C: tl.constexpr):
    """Write pieces of rows, up to row `end`."""
    x, strides = operand
    base = place_of(operand, head, first)
    for i in tl.static_range(len(values)):
        rows = tl.arange(0, values[i].shape[0])[:, None]
        cols = i * DIMS[1] + tl.arange(0, values[i].shape[1])[None, :]
        place = base + (rows.to(C.index) * strides[2] + cols.to(C.index) * strides[3])
        tl.store(place, values[i].to(x.dtype.element_ty), mask=(rows < end - first) & (cols < DIMS[0]))


@triton.jit
@no_type_check
def contract(a, b, acc, C: tl.constexpr):
    """acc + a b^T, over the pieces of a and b."""
    for i in tl.static_range(len(a)):
        acc = tl.dot(a[i], tl.trans(b[i]), acc, input_precision=C.precision)
    return acc


@triton.jit
@no_type_check
def spread(weights, values, accs, C: tl.constexpr):
    """accs + weights values, piece by piece."""
    main = tl.dot(weights, values[0], accs[0], input_precision=C.precision)
    tiles = (main,)
    if len(accs) > 1:
        tiles = (main, tl.dot(weights, values[1], accs[1], input_precision=C.precision))
    return tiles


@triton.jit
@no_type_check
def scaled(accs, factor):
    """Multiply each row of each piece by its factor."""
    main = accs[0] * factor[:, None]
    tiles = (main,)
    if len(accs) > 1:
        tiles = (main, accs[1] * factor[:, None])
    return tiles


@triton.jit
@no_type_check
def zero_rows(ROWS: tl.constexpr, DIMS: tl.constexpr):
    """Accumulators for rows, in pieces."""
    main = tl.full([ROWS, DIMS[1]], 0.0, tl.float32)
    tiles = (main,)
    if DIMS[2] > 0:
        tiles = (main, tl.full([ROWS, DIMS[2]], 0.0, tl.float32))
    return tiles


@triton.jit
@no_type_check
def less(a, b):
    """A - b, piece by piece."""
    main = a[0] - b[0]
    tiles = (main,)
    if len(a) > 1:
        tiles = (main, a[1] - b[1])
    return tiles
