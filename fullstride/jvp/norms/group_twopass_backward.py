"""GroupNorm's backward kernels; equations in `closed_form`, tiles in `group_tiles`.

Two stages of sums: of t, for c and txh, where there is a tangent; then five a channel, of gu, gu xh, gtu, gtu xh and
gtu txh, which weighted and added give a group's means and as they are the parameters' gradients.
A program for each sample and block of groups walks over its pixels once for each stage and once for dx and dtx, where
the groups do not stay on the chip (see `chip_backward`). Where there are too few groups for that see
`group_split`. GTY None: the detached tangent; TX, TW and TB are then None too.
"""

from typing import no_type_check

import triton
import triton.language as tl

from fullstride.jvp.norms.group_tiles import (
    fetch,
    group_value,
    lanes,
    over_groups,
    over_pixels,
    parameter,
    positions,
    silu,
    tangent,
)
from fullstride.jvp.norms.group_twopass_forward import moments


@triton.jit
@no_type_check
def before_silu(gy, gty, TW, TB, xh, txh, w, b, tw, tb, FULL: tl.constexpr, SILU: tl.constexpr):
    """gu and gtu."""
    gu, gtu = gy, gty
    if SILU:
        _, slope, curvature = silu(xh * w + b)
        gu = gy * slope
        if FULL:
            gu += gty * tangent(xh, txh, w, tw, tb, TW, TB) * curvature
            gtu = gty * slope
    return gu, gtu


@triton.jit
@no_type_check
def group_means(sums, w, tw, rc, count, FULL: tl.constexpr, PAD: tl.constexpr, GROUPS: tl.constexpr):
    """<g>, what xh is taken times from g, <h> and d, from the sums of each lane; rc is r <xh t>."""
    sum_gu, sum_gux, sum_gtu, sum_gtux, sum_gtut = sums
    if FULL:
        mean_g = over_groups(w * sum_gu + tw * sum_gtu, PAD, GROUPS) / count
        mean_hx = over_groups(w * sum_gtux, PAD, GROUPS) / count
        mean_h = over_groups(w * sum_gtu, PAD, GROUPS) / count
        mean_gx = over_groups(w * (sum_gux + sum_gtut) + tw * sum_gtux, PAD, GROUPS) / count - rc * mean_hx
    else:
        mean_g = over_groups(w * sum_gu, PAD, GROUPS) / count
        mean_gx = over_groups(w * sum_gux, PAD, GROUPS) / count
        mean_h, mean_hx = mean_gx, mean_gx
    return mean_g, mean_gx, mean_h, mean_hx


@triton.jit
@no_type_check
def write_gradients(DX, DTX, TW, at, inside, gu, gtu, xh, txh, w, tw, r, rc, means, FULL: tl.constexpr):
    """dx and dtx of a tile."""
    mean_g, mean_gx, mean_h, mean_hx = means
    dx = gu * w - mean_g - xh * mean_gx
    if FULL:
        if TW is not None:
            dx += gtu * tw
        if DTX is not None:
            h = gtu * w - mean_h
            dx -= rc * h + mean_hx * txh
            tl.store(DTX + at, (r * (h - xh * mean_hx)).to(DTX.dtype.element_ty), mask=inside)
    tl.store(DX + at, (r * dx).to(DX.dtype.element_ty), mask=inside)


@triton.jit
@no_type_check
def keep_partials(PARTIAL, row, channel, there, channels, sums, DW: tl.constexpr, DB: tl.constexpr,
                  DTW: tl.constexpr, DTB: tl.constexpr):  # fmt: skip
    """A row's shares of dw, db, dtw, dtb: PARTIAL (rows, DW + DB + DTW + DTB, channels)."""
    sum_gu, sum_gux, sum_gtu, sum_gtux, sum_gtut = sums
    if PARTIAL is not None:
        COUNT: tl.constexpr = DW + DB + DTW + DTB
        to = PARTIAL + (row * COUNT).to(tl.int64) * channels + channel
        if DW:
            tl.store(to, sum_gux + sum_gtut, mask=there)
        if DB:
            tl.store(to + DW * channels, sum_gu, mask=there)
        if DTW:
            tl.store(to + (DW + DB) * channels, sum_gtux, mask=there)
        if DTB:
            tl.store(to + (DW + DB + DTW) * channels, sum_gtu, mask=there)


@triton.jit
@no_type_check
def gradient_sums(GY, GTY, X, TX, TW, TB, mean, r, mean_t, rc, w, b, tw, tb, channel, there, first_pixel, end, pixels,
                  channels, LANES: tl.constexpr, PIXELS: tl.constexpr, LAST: tl.constexpr, SILU: tl.constexpr,
                  STAGES: tl.constexpr):  # fmt: skip
    """The five sums of each lane over the pixels from first_pixel to end."""
    FULL: tl.constexpr = GTY is not None
    zero = tl.zeros([PIXELS, LANES], tl.float32)
    sum_gu, sum_gux, sum_gtu, sum_gtux, sum_gtut = zero, zero, zero, zero, zero
    for start in tl.range(first_pixel, end, PIXELS, num_stages=STAGES):
        pixel = start + tl.arange(0, PIXELS)[:, None]
        inside = (pixel < end) & there
        at = positions(pixel, channel, pixels, channels, LAST)
        gy = fetch(GY + at, inside)
        xh = (fetch(X + at, inside) - mean) * r
        gty, txh = gy, tl.zeros_like(xh)
        if FULL:
            gty = fetch(GTY + at, inside)
        if TX is not None:
            txh = r * (fetch(TX + at, inside) - mean_t) - xh * rc
        gu, gtu = before_silu(gy, gty, TW, TB, xh, txh, w, b, tw, tb, FULL, SILU)
        sum_gu += gu
        sum_gux += gu * xh
        if FULL:
            sum_gtu += gtu
            sum_gtux += gtu * xh
            if TX is not None:
                sum_gtut += gtu * txh
    return over_pixels(sum_gu), over_pixels(sum_gux), over_pixels(sum_gtu), over_pixels(sum_gtux), over_pixels(sum_gtut)


@triton.jit
@no_type_check
def gradients(GY, GTY, X, TX, DX, DTX, TW, TB, mean, r, mean_t, rc, means, w, b, tw, tb, channel,
              there, first_pixel, end, pixels, channels, PIXELS: tl.constexpr, LAST: tl.constexpr, SILU: tl.constexpr,
              STAGES: tl.constexpr):  # fmt: skip
    """dx and dtx of the pixels from first_pixel to end."""
    FULL: tl.constexpr = GTY is not None
    for start in tl.range(first_pixel, end, PIXELS, num_stages=STAGES):
        pixel = start + tl.arange(0, PIXELS)[:, None]
        inside = (pixel < end) & there
        at = positions(pixel, channel, pixels, channels, LAST)
        gy = fetch(GY + at, inside)
        xh = (fetch(X + at, inside) - mean) * r
        gty, txh = gy, tl.zeros_like(xh)
        if FULL:
            gty = fetch(GTY + at, inside)
        if TX is not None:
            txh = r * (fetch(TX + at, inside) - mean_t) - xh * rc
        gu, gtu = before_silu(gy, gty, TW, TB, xh, txh, w, b, tw, tb, FULL, SILU)
        write_gradients(DX, DTX, TW, at, inside, gu, gtu, xh, txh, w, tw, r, rc, means, FULL)


@triton.jit
@no_type_check
def backward_kernel(GY, GTY, X, TX, W, B, TW, TB, MEAN, RSTD, DX, DTX, PARTIAL, blocks, groups, channels, pixels,
                    DW: tl.constexpr, DB: tl.constexpr, DTW: tl.constexpr, DTB: tl.constexpr, CPG: tl.constexpr,
                    PAD: tl.constexpr, GROUPS: tl.constexpr, PIXELS: tl.constexpr, LAST: tl.constexpr,
                    SILU: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """A sample's block of groups."""
    FULL: tl.constexpr = GTY is not None
    sample, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    channel, group, there, _ = lanes(block, groups, CPG, PAD, GROUPS)
    w, b = parameter(W, channel, there, 1), parameter(B, channel, there, 0)
    tw, tb = parameter(TW, channel, there, 0), parameter(TB, channel, there, 0)
    mean = group_value(MEAN, sample, block, group, there, groups, GROUPS)
    r = group_value(RSTD, sample, block, group, there, groups, GROUPS)
    base = sample.to(tl.int64) * channels * pixels
    count = CPG * 1.0 * pixels
    gy_at, x_at, dx_at = GY + base, X + base, DX + base
    gty_at, tx_at = None if GTY is None else GTY + base, None if TX is None else TX + base
    dtx_at = None if DTX is None else DTX + base
    mean_t, rc = mean, 0.0
    if TX is not None:
        _, _, mean_t, products = moments(
            x_at, tx_at, channel, there, 0, pixels, pixels, channels, CPG, PAD, GROUPS, PIXELS, LAST, STAGES
        )
        rc = r * r * products / count
    sums = gradient_sums(
        gy_at, gty_at, x_at, tx_at, TW, TB, mean, r, mean_t, rc, w, b, tw, tb, channel, there, 0, pixels, pixels,
        channels, GROUPS * PAD, PIXELS, LAST, SILU, STAGES,
    )  # fmt: skip
    means = group_means(sums, w, tw, rc, count, FULL, PAD, GROUPS)
    gradients(
        gy_at, gty_at, x_at, tx_at, dx_at, dtx_at, TW, TB, mean, r, mean_t, rc, means, w, b, tw,
        tb, channel, there, 0, pixels, pixels, channels, PIXELS, LAST, SILU, STAGES,
    )  # fmt: skip
    keep_partials(PARTIAL, sample, channel, there, channels, sums, DW, DB, DTW, DTB)
