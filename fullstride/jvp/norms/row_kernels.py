"""Kernels of the norms over the last dimension: LayerNorm, RMSNorm, adaptive LayerNorm; equations in `closed_form`.

A program holds a tile of whole rows on the chip: every tensor is read once. The rows belong to `batches` of n rows with
their own weight and bias each (one batch for LayerNorm and RMSNorm); batch b's lie `step` elements after batch b - 1's.
A pointer that is None is absent, and its work is not compiled. Arithmetic in fp32.
"""

from typing import no_type_check

import triton
import triton.language as tl


@triton.jit
@no_type_check
def parameter(at, step, batch, col, D):
    """A batch's row of a parameter, in fp32."""
    return tl.load(at + batch.to(tl.int64) * step + col, mask=col < D, other=0).to(tl.float32)


@triton.jit
@no_type_check
def row_mean(a, D):
    """<a> of each row, as a column; what lies beyond D must be zero."""
    return (tl.sum(a, axis=1) / D)[:, None]


@triton.jit
@no_type_check
def forward_kernel(X, TX, W, B, TW, TB, Y, TY, MEAN, RSTD, n, chunks, length, D, w_step, b_step, tw_step, tb_step, eps,
                   ONE_PLUS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
                   STAGES: tl.constexpr):  # fmt: skip
    """y and ty of `length` rows of one batch; MEAN is None for RMSNorm; ONE_PLUS: the weight is 1 + W."""
    batch, chunk = tl.program_id(0) // chunks, tl.program_id(0) % chunks
    col = tl.arange(0, BLOCK)
    if W is not None:
        w = parameter(W, w_step, batch, col, D)
        w = 1 + w if ONE_PLUS else w
    if B is not None:
        b = parameter(B, b_step, batch, col, D)
    if TW is not None:
        tw = parameter(TW, tw_step, batch, col, D)
    if TB is not None:
        tb = parameter(TB, tb_step, batch, col, D)

    for start in tl.range(chunk * length, tl.minimum(n, chunk * length + length), ROWS, num_stages=STAGES):
        row = start + tl.arange(0, ROWS)
        inside = (row < n)[:, None] & (col < D)[None, :]
        row_at = batch.to(tl.int64) * n + row
        at = row_at[:, None] * D + col[None, :]
        xh = tl.load(X + at, mask=inside, other=0).to(tl.float32)
        if TX is not None:
            t = tl.load(TX + at, mask=inside, other=0).to(tl.float32)
        if MEAN is not None:
            mean = row_mean(xh, D)
            xh = tl.where(inside, xh - mean, 0)
            tl.store(MEAN + row_at[:, None], mean, mask=(row < n)[:, None])
        r = tl.rsqrt(row_mean(xh * xh, D) + eps)
        tl.store(RSTD + row_at[:, None], r, mask=(row < n)[:, None])
        xh *= r

        y = xh
        if W is not None:
            y = y * w[None, :]
        if B is not None:
            y += b[None, :]
        tl.store(Y + at, y.to(Y.dtype.element_ty), mask=inside)

        if TY is not None:
            ty = tl.zeros([ROWS, BLOCK], tl.float32)
            if TX is not None:
                if MEAN is not None:
                    t -= row_mean(t, D)
                ty = r * (t - xh * row_mean(xh * t, D))
                if W is not None:
                    ty *= w[None, :]
            if TW is not None:
                ty += xh * tw[None, :]
            if TB is not None:
                ty += tb[None, :]
            tl.store(TY + at, ty.to(TY.dtype.element_ty), mask=inside)


@triton.jit
@no_type_check
def backward_kernel(GY, GTY, X, TX, W, TW, MEAN, RSTD, DX, DTX, PARTIAL, n, chunks, length, D, w_step, tw_step,
                    ONE_PLUS: tl.constexpr, DW: tl.constexpr, DB: tl.constexpr, DTW: tl.constexpr,
                    DTB: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """dx and dtx of `length` rows of one batch, and their sums for those of dw, db, dtw, dtb that are asked.

    GTY None: the detached tangent; TX, TW are then None. PARTIAL: (batches, chunks, DW + DB + DTW + DTB, D), fp32.
    """
    batch, chunk = tl.program_id(0) // chunks, tl.program_id(0) % chunks
    col = tl.arange(0, BLOCK)
    dw, db = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    dtw, dtb = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    if W is not None:
        w = parameter(W, w_step, batch, col, D)
        w = (1 + w if ONE_PLUS else w)[None, :]
    if TW is not None:
        tw = parameter(TW, tw_step, batch, col, D)[None, :]

    for start in tl.range(chunk * length, tl.minimum(n, chunk * length + length), ROWS, num_stages=STAGES):
        row = start + tl.arange(0, ROWS)
        inside = (row < n)[:, None] & (col < D)[None, :]
        row_at = batch.to(tl.int64) * n + row
        at = row_at[:, None] * D + col[None, :]
        gy = tl.load(GY + at, mask=inside, other=0).to(tl.float32)
        xh = tl.load(X + at, mask=inside, other=0).to(tl.float32)
        if GTY is not None:
            gty = tl.load(GTY + at, mask=inside, other=0).to(tl.float32)
        if TX is not None:
            t = tl.load(TX + at, mask=inside, other=0).to(tl.float32)
        r = tl.load(RSTD + row_at, mask=row < n, other=0)[:, None]
        if MEAN is not None:
            xh = tl.where(inside, xh - tl.load(MEAN + row_at, mask=row < n, other=0)[:, None], 0)
        xh *= r

        g = gy
        if W is not None:
            g = g * w
        if TW is not None:
            g += gty * tw
        along = row_mean(xh * g, D)
        if MEAN is not None:
            g -= row_mean(g, D)
        if DW:
            dw += tl.sum(gy * xh, axis=0)
        if DB:
            db += tl.sum(gy, axis=0)
        if DTW:
            dtw += tl.sum(gty * xh, axis=0)
        if DTB:
            dtb += tl.sum(gty, axis=0)

        if TX is not None:
            h = gty
            if W is not None:
                h = h * w
            d = row_mean(xh * h, D)
            if MEAN is not None:
                h = tl.where(inside, h - row_mean(h, D), 0)
                t = tl.where(inside, t - row_mean(t, D), 0)
            rc = r * row_mean(xh * t, D)
            txh = r * t - xh * rc
            tl.store(DTX + at, (r * (h - xh * d)).to(DTX.dtype.element_ty), mask=inside)
            along += row_mean(h * txh, D) - rc * d
            g -= rc * h + d * txh
            if DW:
                dw += tl.sum(gty * txh, axis=0)
        tl.store(DX + at, (r * (g - xh * along)).to(DX.dtype.element_ty), mask=inside)

    if PARTIAL is not None:
        COUNT: tl.constexpr = DW + DB + DTW + DTB
        to = PARTIAL + (tl.program_id(0) * COUNT).to(tl.int64) * D + col
        if DW:
            tl.store(to, dw, mask=col < D)
        if DB:
            tl.store(to + DW * D, db, mask=col < D)
        if DTW:
            tl.store(to + (DW + DB) * D, dtw, mask=col < D)
        if DTB:
            tl.store(to + (DW + DB + DTW) * D, dtb, mask=col < D)
