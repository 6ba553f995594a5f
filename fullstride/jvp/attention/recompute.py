"""What both backward kernels make anew of a tile of scores and its rows: the softmax, and sums over rows."""

from typing import no_type_check

import triton
import triton.language as tl

from fullstride.jvp.attention.tiles import LOG2E, LOWEST, aligned, load_rows


@triton.jit
@no_type_check
def load_row_numbers(x, at, first, end, ROWS: tl.constexpr):
    """One number a row of fp32 rows that lie side by side; zeros from row `end` on."""
    rows = tl.arange(0, ROWS)
    return tl.load(x + at + first + rows, mask=rows < end - first, other=0.0)


@triton.jit
@no_type_check
def load_lse2(lse, at, first, end, ROWS: tl.constexpr):
    """lse in units of log 2; infinite where there is no key or no query, so that exp2(s - lse) is zero there."""
    rows = tl.arange(0, ROWS)
    x = tl.load(lse + at + first + rows, mask=rows < end - first, other=float("-inf"))
    return tl.where(x == float("-inf"), float("inf"), tl.maximum(x, LOWEST) * LOG2E)


@triton.jit
@no_type_check
def weights(s, lse2, i, j, mask, strides, scale, len_q, len_k, left, right, LEFT: tl.constexpr, RIGHT: tl.constexpr,
            EDGE: tl.constexpr):  # fmt: skip
    """P of a tile of q k^T, whose rows are queries or keys: lse2 and the positions i, j of both broadcast to it."""
    s = s * (scale * LOG2E)
    visible = j < len_k
    if LEFT:
        visible &= j >= i - left
    if RIGHT:
        visible &= j <= i + right
    if mask is not None:
        place = mask + i.to(tl.int64) * strides[2] + j.to(tl.int64) * strides[3]
        tile = tl.load(place, mask=visible & (i < len_q), other=0)
        if mask.dtype.element_ty.is_int():
            visible &= tile != 0
        else:
            added = tile.to(tl.float32)
            s += tl.where(added == float("-inf"), added, tl.maximum(added, LOWEST)) * LOG2E
            # Where all of a row is at -1e9 or so, the rounding of lse alone would make weights of infinity.
            s = tl.minimum(s, lse2)
    p = tl.exp2(s - lse2)
    if LEFT or RIGHT or EDGE or mask is not None:
        p = tl.where(visible, p, 0.0)
    return p


@triton.jit
@no_type_check
def load_columns(x, strides, b, h, first, end, column, DIM: tl.constexpr, ROWS: tl.constexpr, COUNT: tl.constexpr,
                 INDEX: tl.constexpr):  # fmt: skip
    rows = tl.arange(0, ROWS)[:, None]
    columns = column + tl.arange(0, COUNT)[None, :]
    base = x + tl.cast(b, tl.int64) * strides[0] + tl.cast(h, tl.int64) * strides[1]
    base += tl.cast(first, tl.int64) * strides[2]
    place = base + (rows.to(INDEX) * strides[2] + columns.to(INDEX) * strides[3])
    return tl.load(place, mask=(rows < end - first) & (columns < DIM), other=0.0)


@triton.jit
@no_type_check
def dual_products(x, tx, y, ty, x_strides, tx_strides, y_strides, ty_strides, b, h_x, h_y, first_x, end_x, first_y,
                  end_y, DIMS: tl.constexpr, ROWS_X: tl.constexpr, ROWS_Y: tl.constexpr, COUNT: tl.constexpr,
                  PRECISION: tl.constexpr, INDEX: tl.constexpr):  # fmt: skip
    """X y^T and tx y^T + x ty^T of a tile, read COUNT columns at a time; what is absent is zero.

    For fp32, whose operands the compiler keeps in registers from one product to the next: whole rows fill them all.
    """
    s = tl.zeros([ROWS_X, ROWS_Y], tl.float32)
    t = tl.zeros([ROWS_X, ROWS_Y], tl.float32)
    for column in range(0, DIMS[0], COUNT):
        x_part = load_columns(x, x_strides, b, h_x, first_x, end_x, column, DIMS[0], ROWS_X, COUNT, INDEX)
        y_part = load_columns(y, y_strides, b, h_y, first_y, end_y, column, DIMS[0], ROWS_Y, COUNT, INDEX)
        s = tl.dot(x_part, tl.trans(y_part), s, input_precision=PRECISION)
        if tx is not None:
            part = load_columns(tx, tx_strides, b, h_x, first_x, end_x, column, DIMS[0], ROWS_X, COUNT, INDEX)
            t = tl.dot(part, tl.trans(y_part), t, input_precision=PRECISION)
        if ty is not None:
            part = load_columns(ty, ty_strides, b, h_y, first_y, end_y, column, DIMS[0], ROWS_Y, COUNT, INDEX)
            t = tl.dot(x_part, tl.trans(part), t, input_precision=PRECISION)
    return s, t


@triton.jit
@no_type_check
def row_dots(a, b):
    """rowsum(a b) of two tiles in pieces."""
    total = tl.sum(a[0].to(tl.float32) * b[0].to(tl.float32), 1)
    if len(a) == 2:
        total += tl.sum(a[1].to(tl.float32) * b[1].to(tl.float32), 1)
    return total


@triton.jit
@no_type_check
def row_sums(go, gto, o, to, delta, d2, go_strides, gto_strides, o_strides, to_strides, heads, length, blocks,
             V: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, INDEX: tl.constexpr):  # fmt: skip
    """delta = rowsum(go o + gto to) and d2 = rowsum(gto o) of a block of rows of one head."""
    head, first = tl.program_id(0) // blocks, tl.program_id(0) % blocks * BLOCK
    b, h = head // heads, head % heads
    rows = first + tl.arange(0, BLOCK)
    at = tl.cast(head, tl.int64) * length + rows
    go_strides, o_strides = aligned(go_strides, STEP), aligned(o_strides, STEP)
    o_tile = load_rows(o, o_strides, b, h, first, length, V, BLOCK, False, True, INDEX)
    total = row_dots(load_rows(go, go_strides, b, h, first, length, V, BLOCK, False, True, INDEX), o_tile)
    if gto is not None:
        gto_strides, to_strides = aligned(gto_strides, STEP), aligned(to_strides, STEP)
        gto_tile = load_rows(gto, gto_strides, b, h, first, length, V, BLOCK, False, True, INDEX)
        to_tile = load_rows(to, to_strides, b, h, first, length, V, BLOCK, False, True, INDEX)
        total += row_dots(gto_tile, to_tile)
        tl.store(d2 + at, row_dots(gto_tile, o_tile), mask=rows < length)
    tl.store(delta + at, total, mask=rows < length)
