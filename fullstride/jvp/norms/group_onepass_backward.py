"""GroupNorm's backward kernel for groups that stay on the chip; equations in `closed_form`, tiles in `chip_tiles`.

A program for each sample and block of groups; every tensor is read once. With t' = t - <t> - r^2 <x t> (x - <x>) it is
xh = r (x - <x>) and txh = r t'. First what makes t', where there is a tangent; then four sums of each channel, of gu,
gu x + gtu t', gtu and gtu x, which weighted and added give a group's means and as they are the parameters' gradients.
GTY None: the detached tangent; TX, TW and TB are then None too.
"""

from typing import no_type_check

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from fullstride.jvp.norms.group_onepass_tiles import less, load_tile, over_pixels, store_piece, totals, unpacked
from fullstride.jvp.norms.group_tiles import group_value, lanes, parameter
from fullstride.jvp.norms.sums import sigmoid


@triton.jit
@no_type_check
def tangent_moments(x, t, mean, r, there, pixels, count, PAD: tl.constexpr, GROUPS: tl.constexpr,
                    PIECE: tl.constexpr, EXACT: tl.constexpr):  # fmt: skip
    """<t> and r^2 <x t>; what is left of <x> after its subtraction is taken off too."""
    s_t = tl.zeros(x[0].shape, tl.float32)
    s_x, s_xt = s_t, s_t
    for i in tl.static_range(len(x)):
        xc, ti = less(unpacked(x, i, 0), mean, i, there, pixels, PIECE, EXACT), unpacked(t, i, 0)
        s_x += xc
        s_t += ti
        s_xt += xc * ti
    s_x, s_t, s_xt = totals((s_x, s_t, s_xt), PAD, GROUPS)
    mean_t = s_t / count
    return mean_t, (s_xt - s_x * mean_t) / count * r * r


@triton.jit
@no_type_check
def before_silu(gy, gty, xc, tc, scale, b, tscale, tb, TX, TW, TB, FULL: tl.constexpr, SILU: tl.constexpr):
    """gu and gtu, from xc = x - <x> and tc = t'; scale is r w, tscale is r tw."""
    gu, gtu = gy, gty
    if SILU:
        u = xc * scale + b
        s = sigmoid(u)
        y, rest = u * s, 1 - s
        slope = s + y * rest
        gu = gy * slope
        if FULL:
            gtu = gty * slope
            tu = tl.zeros_like(u)
            if TX is not None:
                tu = tc * scale
            if TW is not None:
                tu += xc * tscale
            if TB is not None:
                tu += tb
            gu += gty * tu * (s * rest * (2 + u - 2 * y))
    return gu, gtu


@triton.jit
@no_type_check
def gradient_tile(gy, gty, x, t, i: tl.constexpr, mean, mean_t, cov_xt, scale, b, tscale, tb, TX, TW, TB, there, pixels,
                  FULL: tl.constexpr, PIECE: tl.constexpr, EXACT: tl.constexpr, SILU: tl.constexpr,
                  STEP: tl.constexpr):  # fmt: skip
    """Piece i of gu, gtu, x - <x> and t'."""
    xc = less(unpacked(x, i, STEP), mean, i, there, pixels, PIECE, EXACT)
    tc = tl.zeros_like(xc)
    if TX is not None:
        tc = unpacked(t, i, STEP) - mean_t - xc * cov_xt
    gyi = unpacked(gy, i, STEP)
    gtyi = unpacked(gty, i, STEP) if FULL else gyi
    gu, gtu = before_silu(gyi, gtyi, xc, tc, scale, b, tscale, tb, TX, TW, TB, FULL, SILU)
    return gu, gtu, xc, tc


@triton.jit
@no_type_check
def backward_kernel(GY, GTY, X, TX, W, B, TW, TB, MEAN, RSTD, DX, DTX, PARTIAL, blocks, groups, channels, pixels,
                    DW: tl.constexpr, DB: tl.constexpr, DTW: tl.constexpr, DTB: tl.constexpr, CPG: tl.constexpr,
                    PAD: tl.constexpr, GROUPS: tl.constexpr, PIECES: tl.constexpr, PIECE: tl.constexpr,
                    LAST: tl.constexpr, EXACT: tl.constexpr, PACKED: tl.constexpr, SILU: tl.constexpr,
                    EARLY: tl.constexpr):  # fmt: skip
    """dx and dtx of a sample's block of groups; its shares of dw, db, dtw, dtb: PARTIAL (samples, ..., channels)."""
    FULL: tl.constexpr = GTY is not None
    if EARLY:  # The sums of PARTIAL may take their places, where they wait.
        gdc_launch_dependents()
    sample, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    channel, group, there, _ = lanes(block, groups, CPG, PAD, GROUPS)
    base = sample.to(tl.int64) * channels * pixels
    count = CPG * 1.0 * pixels
    x = load_tile(X + base, channel, there, pixels, channels, PIECES, PIECE, LAST, EXACT)
    t = x
    if TX is not None:
        t = load_tile(TX + base, channel, there, pixels, channels, PIECES, PIECE, LAST, EXACT)
    gy = load_tile(GY + base, channel, there, pixels, channels, PIECES, PIECE, LAST, EXACT)
    gty = gy
    if FULL:
        gty = load_tile(GTY + base, channel, there, pixels, channels, PIECES, PIECE, LAST, EXACT)
    w, b = parameter(W, channel, there, 1), parameter(B, channel, there, 0)
    tw, tb = parameter(TW, channel, there, 0), parameter(TB, channel, there, 0)
    mean = group_value(MEAN, sample, block, group, there, groups, GROUPS)
    r = group_value(RSTD, sample, block, group, there, groups, GROUPS)

    # dx = r (g - <g> - rc (h - <h>) - d txh - xh (<xh g> + <txh h> - rc d)), rc = r^2 <x t>, in terms of x and t'.
    mean_t, cov_xt = mean, r
    if TX is not None:
        mean_t, cov_xt = tangent_moments(x, t, mean, r, there, pixels, count, PAD, GROUPS, PIECE, EXACT)
    scale, tscale = w * r, tw * r
    sum_gu = tl.zeros(x[0].shape, tl.float32)
    sum_gux, sum_gtu, sum_gtux = sum_gu, sum_gu, sum_gu
    for i in tl.static_range(PIECES):
        gu, gtu, xc, tc = gradient_tile(
            gy, gty, x, t, i, mean, mean_t, cov_xt, scale, b, tscale, tb, TX, TW, TB, there, pixels, FULL, PIECE, EXACT,
            SILU, 1 * PACKED,
        )  # fmt: skip
        sum_gu += gu
        sum_gux += gu * xc
        if FULL:
            sum_gtu += gtu
            sum_gtux += gtu * xc
            if TX is not None:
                sum_gux += gtu * tc
    if FULL:
        sum_gu, sum_gux, sum_gtu, sum_gtux = over_pixels((sum_gu, sum_gux, sum_gtu, sum_gtux))
        of_lanes = (w * sum_gu + tw * sum_gtu, w * sum_gux + tw * sum_gtux, w * sum_gtu, w * sum_gtux)
        mean_g, mean_gx, mean_h, mean_hx = totals(of_lanes, PAD, GROUPS)
        mean_h, mean_hx = mean_h / count, mean_hx * r / count
    else:
        sum_gu, sum_gux = over_pixels((sum_gu, sum_gux))
        mean_g, mean_gx = totals((w * sum_gu, w * sum_gux), PAD, GROUPS)
        mean_h, mean_hx = mean_g, mean_g

    mean_g, mean_gx = mean_g / count, mean_gx * r / count
    if TX is not None:
        mean_g -= cov_xt * mean_h
        mean_gx -= cov_xt * mean_hx
    for i in tl.static_range(PIECES):
        gu, gtu, xc, tc = gradient_tile(
            gy, gty, x, t, i, mean, mean_t, cov_xt, scale, b, tscale, tb, TX, TW, TB, there, pixels, FULL, PIECE, EXACT,
            SILU, 2 * PACKED,
        )  # fmt: skip
        dx = scale * gu - r * mean_g - xc * (r * r * mean_gx)
        if TW is not None:
            dx += tscale * gtu
        if TX is not None:
            turned = scale * gtu
            dx -= cov_xt * turned + tc * (r * r * mean_hx)
            dtx = turned - r * mean_h - xc * (r * r * mean_hx)
            store_piece(DTX + base, dtx, i, channel, there, pixels, channels, PIECE, LAST, EXACT)
        store_piece(DX + base, dx, i, channel, there, pixels, channels, PIECE, LAST, EXACT)

    if PARTIAL is not None:
        COUNT: tl.constexpr = DW + DB + DTW + DTB
        to = PARTIAL + (sample * COUNT).to(tl.int64) * channels + channel
        if DW:
            tl.store(to, r * sum_gux, mask=there)
        if DB:
            tl.store(to + DW * channels, sum_gu, mask=there)
        if DTW:
            tl.store(to + (DW + DB) * channels, r * sum_gtux, mask=there)
        if DTB:
            tl.store(to + (DW + DB + DTW) * channels, sum_gtu, mask=there)
