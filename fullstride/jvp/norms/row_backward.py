"""The backward kernel of LayerNorm, RMSNorm and adaptive LayerNorm; equations in `closed_form`, pieces in `row_tiles`.

Rows, batches and absent pointers as in `row_forward`. Sums for the parameters' gradients stay in registers, one for
each place of a tile, until the program's last row.
"""

from typing import no_type_check

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from fullstride.jvp.norms.row_tiles import (
    columns,
    dot,
    less,
    load_parameter,
    load_piece,
    load_rows,
    means,
    store_piece,
    summed,
    times,
)


@triton.jit
@no_type_check
def zeros(ROWS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr):
    """A tile of nothing, in pieces."""
    tiles = ()
    for _ in tl.static_range((D + WIDTH - 1) // WIDTH):
        tiles += (tl.zeros([ROWS, WIDTH], tl.float32),)
    return tiles


@triton.jit
@no_type_check
def plus(a, b):
    """A + b, piece by piece."""
    tiles = ()
    for i in tl.static_range(len(a)):
        tiles += (a[i] + b[i],)
    return tiles


@triton.jit
@no_type_check
def plus_product(a, b, c):
    """A + b c, piece by piece."""
    tiles = ()
    for i in tl.static_range(len(a)):
        tiles += (a[i] + b[i] * c[i],)
    return tiles


@triton.jit
@no_type_check
def weighted(a, W, batch, step, kept, PLUS: tl.constexpr, KEEP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr,
             WIDTH: tl.constexpr):  # fmt: skip
    """A (PLUS + weight), piece by piece."""
    tiles = ()
    for i in tl.static_range(len(a)):
        if KEEP:
            w = kept[i]
        else:
            w = load_piece(W + batch.to(tl.int64) * step + 0 * tl.arange(0, ROWS)[:, None], True, i, D, WIDTH)
        tiles += (a[i] * (w + PLUS),)
    return tiles


@triton.jit
@no_type_check
def keep_sum(at, tiles, D: tl.constexpr, WIDTH: tl.constexpr):
    """A row of the sums over a tile's rows."""
    for i in tl.static_range(len(tiles)):
        col = columns(i, WIDTH)
        tl.store(at + col, tl.sum(tiles[i], axis=0)[None, :], mask=col < D)


@triton.jit
@no_type_check
def backward_kernel(GY, GTY, X, TX, W, TW, MEAN, RSTD, DX, DTX, PARTIAL, n, chunks, length, w_step, tw_step,
                    ONE_PLUS: tl.constexpr, DW: tl.constexpr, DB: tl.constexpr, DTW: tl.constexpr,
                    DTB: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, KEEP: tl.constexpr,
                    STAGES: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """dx and dtx of `length` rows of one batch, and their sums for those of dw, db, dtw, dtb that are needed.

    GTY None: the detached tangent; TX, TW are then None. PARTIAL: (batches, chunks, DW + DB + DTW + DTB, D), fp32.
    """
    if EARLY:  # The kernel that sums PARTIAL may start now, and waits.
        gdc_launch_dependents()
    batch, chunk = tl.program_id(0) // chunks, tl.program_id(0) % chunks
    dw, db, dtw, dtb = (), (), (), ()
    if DW:
        dw = zeros(ROWS, D, WIDTH)
    if DB:
        db = zeros(ROWS, D, WIDTH)
    if DTW:
        dtw = zeros(ROWS, D, WIDTH)
    if DTB:
        dtb = zeros(ROWS, D, WIDTH)
    w, tw = (), ()
    if KEEP:
        if W is not None:
            w = load_parameter(W, batch, w_step, 1, D, WIDTH)
        if TW is not None:
            tw = load_parameter(TW, batch, tw_step, 1, D, WIDTH)

    for start in tl.range(chunk * length, tl.minimum(n, chunk * length + length), ROWS, num_stages=STAGES):
        row = start + tl.arange(0, ROWS)[:, None]
        there = row < n
        row_at = batch.to(tl.int64) * n + row
        at = row_at * D
        gy, xh = load_rows(GY + at, there, D, WIDTH), load_rows(X + at, there, D, WIDTH)
        gty, t = gy, xh
        if GTY is not None:
            gty = load_rows(GTY + at, there, D, WIDTH)
        if TX is not None:
            t = load_rows(TX + at, there, D, WIDTH)
        r = tl.load(RSTD + row_at, mask=there, other=0)
        if MEAN is not None:
            xh = less(xh, tl.load(MEAN + row_at, mask=there, other=0), D, WIDTH)
        xh = times(xh, r)

        g, h = gy, gty
        if W is not None:
            g = weighted(gy, W, batch, w_step, w, 1.0 if ONE_PLUS else 0.0, KEEP, ROWS, D, WIDTH)
            if TX is not None:
                h = weighted(gty, W, batch, w_step, w, 1.0 if ONE_PLUS else 0.0, KEEP, ROWS, D, WIDTH)
        if TW is not None:
            g = plus(g, weighted(gty, TW, batch, tw_step, tw, 0.0, KEEP, ROWS, D, WIDTH))

        mean_g, mean_h, rc, mean_hx = 0.0, 0.0, 0.0, 0.0
        if TX is not None:
            if MEAN is not None:
                products = (dot(xh, g), summed(g), dot(xh, h), summed(h), summed(t))
                mean_gx, mean_g, mean_hx, mean_h, mean_t = means(products, D)
                h, t = less(h, mean_h, D, WIDTH), less(t, mean_t, D, WIDTH)
            else:
                mean_gx, mean_hx = means((dot(xh, g), dot(xh, h)), D)
            rc, mean_ht = means((dot(xh, t), dot(h, t)), D)
            rc *= r
            mean_gx += r * mean_ht - 2 * rc * mean_hx
            t = plus(times(t, r), times(xh, -rc))
        elif MEAN is not None:
            mean_gx, mean_g = means((dot(xh, g), summed(g)), D)
        else:
            (mean_gx,) = means((dot(xh, g),), D)

        if DW:
            dw = plus_product(dw, gy, xh)
            if TX is not None:
                dw = plus_product(dw, gty, t)
        if DB:
            db = plus(db, gy)
        if DTW:
            dtw = plus_product(dtw, gty, xh)
        if DTB:
            dtb = plus(dtb, gty)
        for i in tl.static_range((D + WIDTH - 1) // WIDTH):
            dx = g[i] - mean_g - xh[i] * mean_gx
            if TX is not None:
                dx -= rc * h[i] + mean_hx * t[i]
                store_piece(DTX + at, r * (h[i] - xh[i] * mean_hx), there, i, D, WIDTH)
            store_piece(DX + at, r * dx, there, i, D, WIDTH)

    if PARTIAL is not None:
        COUNT: tl.constexpr = DW + DB + DTW + DTB
        to = PARTIAL + (tl.program_id(0) * COUNT).to(tl.int64) * D
        if DW:
            keep_sum(to, dw, D, WIDTH)
        if DB:
            keep_sum(to + DW * D, db, D, WIDTH)
        if DTW:
            keep_sum(to + (DW + DB) * D, dtw, D, WIDTH)
        if DTB:
            keep_sum(to + (DW + DB + DTW) * D, dtb, D, WIDTH)
