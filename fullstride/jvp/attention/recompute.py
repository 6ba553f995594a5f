"""Recomputation in both backward kernels, for a tile of scores: the softmax, and sums over rows."""

from typing import no_type_check

import triton
import triton.language as tl

from fullstride.jvp.attention.tiles import LOG2E, LOWEST, aligned, load_rows, place_of


@triton.jit
@no_type_check
def load_row_numbers(x, at, first, end, ROWS: tl.constexpr):
    """Load one fp32 number per row, contiguous in memory; zeros from row `end` on."""
    rows = tl.arange(0, ROWS)
    return tl.load(x + at + first + rows, mask=rows < end - first, other=0.0)


@triton.jit
@no_type_check
def load_lse2(lse, at, first, end, ROWS: tl.constexpr):
    """Load lse in units of log 2; infinite if there is no key or no query, so that exp2(s - lse) is zero."""
    rows = tl.arange(0, ROWS)
    x = tl.load(lse + at + first + rows, mask=rows < end - first, other=float("-inf"))
    return tl.where(x == float("-inf"), float("inf"), tl.maximum(x, LOWEST) * LOG2E)


@triton.jit
@no_type_check
def weights(s, lse2, i, j, mask, strides, scale, lengths, band, C: tl.constexpr):
    """P of a tile of q k^T, whose rows are queries or keys: lse2 and the positions i, j of both broadcast to it.

    `mask` is a head's.
    """
    len_q, len_k = lengths
    left, right = band
    s = s * (scale * LOG2E)
    visible = j < len_k
    if C.left:
        visible &= j >= i - left
    if C.right:
        visible &= j <= i + right
    if mask is not None:
        place = mask + i.to(tl.int64) * strides[2] + j.to(tl.int64) * strides[3]
        tile = tl.load(place, mask=visible & (i < len_q), other=0)
        if mask.dtype.element_ty.is_int():
            visible &= tile != 0
        else:
            added = tile.to(tl.float32)
            s += tl.where(added == float("-inf"), added, tl.maximum(added, LOWEST)) * LOG2E
            # If all of a row is near -1e9, the rounding of lse alone would make weights infinite.
            s = tl.minimum(s, lse2)
    p = tl.exp2(s - lse2)
    if C.left or C.right or C.edge or mask is not None:
        p = tl.where(visible, p, 0.0)
    return p


@triton.jit
@no_type_check
def load_columns(operand, head, rows, column, DIM: tl.constexpr, ROWS: tl.constexpr, C: tl.constexpr):
    first, end = rows
    _, strides = operand
    row = tl.arange(0, ROWS)[:, None]
    columns = column + tl.arange(0, C.parts)[None, :]
    place = place_of(operand, head, first) + (row.to(C.index) * strides[2] + columns.to(C.index) * strides[3])
    return tl.load(place, mask=(row < end - first) & (columns < DIM), other=0.0)


@triton.jit
@no_type_check
def dual_products(x, tx, y, ty, head_x, head_y, rows_x, rows_y, DIM: tl.constexpr, ROWS_X: tl.constexpr,
                  ROWS_Y: tl.constexpr, C: tl.constexpr):  # fmt: skip
    """X y^T and tx y^T + x ty^T of a tile, read `parts` columns at a time; what is absent is zero.

    For fp32, whose operands the compiler keeps in registers from one product to the next: whole rows fill them all.
    """
    s = tl.zeros([ROWS_X, ROWS_Y], tl.float32)
    t = tl.zeros([ROWS_X, ROWS_Y], tl.float32)
    for column in range(0, DIM, C.parts):
        x_part = load_columns(x, head_x, rows_x, column, DIM, ROWS_X, C)
        y_part = load_columns(y, head_y, rows_y, column, DIM, ROWS_Y, C)
        s = tl.dot(x_part, tl.trans(y_part), s, input_precision=C.precision)
        if tx[0] is not None:
            part = load_columns(tx, head_x, rows_x, column, DIM, ROWS_X, C)
            t = tl.dot(part, tl.trans(y_part), t, input_precision=C.precision)
        if ty[0] is not None:
            part = load_columns(ty, head_y, rows_y, column, DIM, ROWS_Y, C)
            t = tl.dot(x_part, tl.trans(part), t, input_precision=C.precision)
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
def row_sums(tensors, sums, strides, sizes, C: tl.constexpr):
    """Delta = rowsum(go o + gto to) and d2 = rowsum(gto o) of a block of rows of one head, from go, gto, o and to."""
    V: tl.constexpr = C.v
    go, gto, o, to = tensors
    s_go, s_gto, s_o, s_to = aligned(strides, 4, C.step)
    heads, length, blocks = sizes
    head, first = tl.program_id(0) // blocks, tl.program_id(0) % blocks * C.block_m
    own = head // heads, head % heads
    rows = first + tl.arange(0, C.block_m)
    at = tl.cast(head, tl.int64) * length + rows
    o_tile = load_rows((o, s_o), own, first, length, V, C.block_m, True, C)
    total = row_dots(load_rows((go, s_go), own, first, length, V, C.block_m, True, C), o_tile)
    if gto is not None:
        gto_tile = load_rows((gto, s_gto), own, first, length, V, C.block_m, True, C)
        to_tile = load_rows((to, s_to), own, first, length, V, C.block_m, True, C)
        total += row_dots(gto_tile, to_tile)
        tl.store(sums[1] + at, row_dots(gto_tile, o_tile), mask=rows < length)
    tl.store(sums[0] + at, total, mask=rows < length)
