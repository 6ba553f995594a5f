"""The forward kernel of LayerNorm, RMSNorm and adaptive LayerNorm; equations in `closed_form`, pieces in `row_tiles`.

A program holds a tile of whole rows on the chip: every tensor is read once. The rows belong to `batches` of n rows with
their own weight and bias each (one batch for LayerNorm and RMSNorm); batch b's lie `step` elements after batch b - 1's.
A pointer that is None is absent, and its work is not compiled. Arithmetic in fp32.
"""

from typing import no_type_check

import triton
import triton.language as tl

from fullstride.jvp.norms.row_tiles import (
    dot,
    less,
    load_parameter,
    load_piece,
    load_rows,
    means,
    store_piece,
    summed,
)


@triton.jit
@no_type_check
def normalise(x, t, TX, MEAN, eps, D: tl.constexpr, WIDTH: tl.constexpr):
    """x and t less their means (not for RMSNorm), the mean, r and r^2 <x t>: xh = r x, txh = r (t - r^2 <x t> x)."""
    centre, cov_xt = 0.0, 0.0
    if TX is not None:
        if MEAN is not None:
            centre, centre_t = means((summed(x), summed(t)), D)
            x, t = less(x, centre, D, WIDTH), less(t, centre_t, D, WIDTH)
        squares, products = means((dot(x, x), dot(x, t)), D)
        r = tl.rsqrt(squares + eps)
        cov_xt = products * r * r
    else:
        if MEAN is not None:
            (centre,) = means((summed(x),), D)
            x = less(x, centre, D, WIDTH)
        (squares,) = means((dot(x, x),), D)
        r = tl.rsqrt(squares + eps)
    return x, t, centre, r, cov_xt


@triton.jit
@no_type_check
def parameter_piece(at, kept, batch, step, i: tl.constexpr, KEEP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr,
                    WIDTH: tl.constexpr):  # fmt: skip
    """Piece i of a parameter, from registers or read again."""
    if KEEP:
        piece = kept[i]
    else:
        piece = load_piece(at + batch.to(tl.int64) * step + 0 * tl.arange(0, ROWS)[:, None], True, i, D, WIDTH)
    return piece


@triton.jit
@no_type_check
def forward_kernel(X, TX, W, B, TW, TB, Y, TY, MEAN, RSTD, n, chunks, length, w_step, b_step, tw_step, tb_step, eps,
                   ONE_PLUS: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
                   KEEP: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """y and ty of `length` rows of one batch; MEAN is None for RMSNorm; ONE_PLUS: the weight is 1 + W."""
    batch, chunk = tl.program_id(0) // chunks, tl.program_id(0) % chunks
    w, b, tw, tb = (), (), (), ()
    if KEEP:
        if W is not None:
            w = load_parameter(W, batch, w_step, 1, D, WIDTH)
        if B is not None:
            b = load_parameter(B, batch, b_step, 1, D, WIDTH)
        if TW is not None:
            tw = load_parameter(TW, batch, tw_step, 1, D, WIDTH)
        if TB is not None:
            tb = load_parameter(TB, batch, tb_step, 1, D, WIDTH)

    for start in tl.range(chunk * length, tl.minimum(n, chunk * length + length), ROWS, num_stages=STAGES):
        row = start + tl.arange(0, ROWS)[:, None]
        there = row < n
        row_at = batch.to(tl.int64) * n + row
        at = row_at * D
        x = load_rows(X + at, there, D, WIDTH)
        t = x
        if TX is not None:
            t = load_rows(TX + at, there, D, WIDTH)
        x, t, centre, r, cov_xt = normalise(x, t, TX, MEAN, eps, D, WIDTH)
        if MEAN is not None:
            tl.store(MEAN + row_at, centre, mask=there)
        tl.store(RSTD + row_at, r, mask=there)

        for i in tl.static_range((D + WIDTH - 1) // WIDTH):
            scale = r
            if W is not None:
                wi = parameter_piece(W, w, batch, w_step, i, KEEP, ROWS, D, WIDTH)
                scale = (1 + wi if ONE_PLUS else wi) * r
            y = x[i] * scale
            if B is not None:
                y += parameter_piece(B, b, batch, b_step, i, KEEP, ROWS, D, WIDTH)
            store_piece(Y + at, y, there, i, D, WIDTH)
            if TY is not None:
                ty = tl.zeros_like(y)
                if TX is not None:
                    ty = (t[i] - x[i] * cov_xt) * scale
                if TW is not None:
                    ty += x[i] * (parameter_piece(TW, tw, batch, tw_step, i, KEEP, ROWS, D, WIDTH) * r)
                if TB is not None:
                    ty += parameter_piece(TB, tb, batch, tb_step, i, KEEP, ROWS, D, WIDTH)
                store_piece(TY + at, ty, there, i, D, WIDTH)
