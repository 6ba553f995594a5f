"""The backward kernel of GroupNorm for groups that stay on the chip; equations in `closed_form`.

A program for each sample and block of groups; every tensor is read once. With t' = t - <t> - r^2 <x t> (x - <x>) it is
xh = r (x - <x>) and txh = r t'. First the moments of t', if there is a tangent; then four sums of each channel, of gu,
gu x + gtu t', gtu and gtu x, which weighted and added give a group's means and as they are the parameters' gradients.
GTY None: the detached tangent; TX, TW and TB are then None too.
"""

from typing import no_type_check

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from fullstride.jvp.norms.group_onepass_tiles import less, load_tile, over_pixels, store_piece, totals, unpacked
from fullstride.jvp.norms.group_tiles import group_value, keep_partials, lanes, parameters, shift_of
from fullstride.jvp.norms.sums import sigmoid


@triton.jit
@no_type_check
def tangent_moments(x, t, mean, r, TSHIFT, tshift, lane, sizes, count, T: tl.constexpr):
    """<t> and r^2 <x t>; what is left of <x> after its subtraction is taken off too."""
    s_t = tl.zeros(x[0].shape, tl.float32)
    s_x, s_xt = s_t, s_t
    for i in tl.static_range(len(x)):
        xc, ti = less(unpacked(x, i, 0), mean, i, lane, sizes, T), unpacked(t, i, 0)
        if TSHIFT is not None:
            ti = less(ti, -tshift, i, lane, sizes, T)
        s_x += xc
        s_t += ti
        s_xt += xc * ti
    s_x, s_t, s_xt = totals((s_x, s_t, s_xt), T)
    mean_t = s_t / count
    return mean_t, (s_xt - s_x * mean_t) / count * r * r


@triton.jit
@no_type_check
def before_silu(gy, gty, xc, tc, scales, inputs, affine, T: tl.constexpr):
    """gu and gtu, from xc = x - <x> and tc = t'; the scales are r w, b, r tw and tb."""
    scale, b, tscale, tb = scales
    gu, gtu = gy, gty
    if T.silu:
        u = xc * scale + b
        s = sigmoid(u)
        y, rest = u * s, 1 - s
        slope = s + y * rest
        gu = gy * slope
        if inputs[1] is not None:
            gtu = gty * slope
            tu = tl.zeros_like(u)
            if inputs[3] is not None:
                tu = tc * scale
            if affine[2] is not None:
                tu += xc * tscale
            if affine[3] is not None:
                tu += tb
            gu += gty * tu * (s * rest * (2 + u - 2 * y))
    return gu, gtu


@triton.jit
@no_type_check
def gradient_piece(tiles, i: tl.constexpr, statistics, scales, inputs, affine, lane, sizes, T: tl.constexpr,
                   STEP: tl.constexpr):  # fmt: skip
    """Piece i of gu, gtu, x - <x> and t'; the statistics are <x>, <t> and r^2 <x t>."""
    gy, gty, x, t = tiles
    mean, mean_t, cov_xt = statistics
    xc = less(unpacked(x, i, STEP), mean, i, lane, sizes, T)
    tc = tl.zeros_like(xc)
    if inputs[3] is not None:
        tc = unpacked(t, i, STEP) - mean_t - xc * cov_xt
    gyi = unpacked(gy, i, STEP)
    gtyi = unpacked(gty, i, STEP) if inputs[1] is not None else gyi
    gu, gtu = before_silu(gyi, gtyi, xc, tc, scales, inputs, affine, T)
    return gu, gtu, xc, tc


@triton.jit
@no_type_check
def keep_shift(at, tile, sample, channels, lane):
    """Write the gradient of a sample's shift, if there is one: the sum over the pixels of that of what it moves."""
    if at is not None:
        (summed,) = over_pixels((tile,))
        to = at + sample.to(tl.int64) * channels + lane[0]
        tl.store(to, summed.to(at.dtype.element_ty), mask=lane[2])


@triton.jit
@no_type_check
def backward_kernel(inputs, affine, kept, shifts, outs, PARTIAL, blocks, sizes, ASKED: tl.constexpr, T: tl.constexpr,
                    EARLY: tl.constexpr):  # fmt: skip
    """dx and dtx of a sample's block of groups, and its shares of dw, db, dtw, dtb.

    Shifts are those of x and of its tangent, and outs end in their gradients; the other arguments are those of
    `group_twopass_backward`.
    """
    FULL: tl.constexpr = inputs[1] is not None
    MOVES: tl.constexpr = inputs[3] is not None
    if EARLY:  # The kernel that sums PARTIAL may start now, and waits.
        gdc_launch_dependents()
    groups, channels, pixels = sizes
    sample, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    lane = lanes(block, groups, T)
    base = sample.to(tl.int64) * channels * pixels
    count = T.cpg * 1.0 * pixels
    x = load_tile(inputs[2] + base, lane, sizes, T)
    t = x
    if MOVES:
        t = load_tile(inputs[3] + base, lane, sizes, T)
    gy = load_tile(inputs[0] + base, lane, sizes, T)
    gty = gy
    if FULL:
        gty = load_tile(inputs[1] + base, lane, sizes, T)
    w, b, tw, tb = parameters(affine, lane)
    mean = group_value(kept[0], sample, block, lane, groups, T)
    r = group_value(kept[1], sample, block, lane, groups, T)

    # dx = r (g - <g> - rc (h - <h>) - d txh - xh (<xh g> + <txh h> - rc d)), rc = r^2 <x t>, in terms of x and t'.
    if shifts[0] is not None:
        mean -= shift_of(shifts[0], sample, channels, lane)  # what is taken from x as it lies
    mean_t, cov_xt, tshift = mean, r, r
    if shifts[1] is not None:
        tshift = shift_of(shifts[1], sample, channels, lane)
    if MOVES:
        mean_t, cov_xt = tangent_moments(x, t, mean, r, shifts[1], tshift, lane, sizes, count, T)
        if shifts[1] is not None:
            mean_t -= tshift
    scale, tscale = w * r, tw * r
    tiles, statistics, scales = (gy, gty, x, t), (mean, mean_t, cov_xt), (scale, b, tscale, tb)
    sum_gu = tl.zeros(x[0].shape, tl.float32)
    sum_gux, sum_gtu, sum_gtux = sum_gu, sum_gu, sum_gu
    for i in tl.static_range(len(x)):
        gu, gtu, xc, tc = gradient_piece(tiles, i, statistics, scales, inputs, affine, lane, sizes, T, 1 * T.packed)
        sum_gu += gu
        sum_gux += gu * xc
        if FULL:
            sum_gtu += gtu
            sum_gtux += gtu * xc
            if MOVES:
                sum_gux += gtu * tc
    if FULL:
        sum_gu, sum_gux, sum_gtu, sum_gtux = over_pixels((sum_gu, sum_gux, sum_gtu, sum_gtux))
        of_lanes = (w * sum_gu + tw * sum_gtu, w * sum_gux + tw * sum_gtux, w * sum_gtu, w * sum_gtux)
        mean_g, mean_gx, mean_h, mean_hx = totals(of_lanes, T)
        mean_h, mean_hx = mean_h / count, mean_hx * r / count
    else:
        sum_gu, sum_gux = over_pixels((sum_gu, sum_gux))
        mean_g, mean_gx = totals((w * sum_gu, w * sum_gux), T)
        mean_h, mean_hx = mean_g, mean_g
        sum_gtu, sum_gtux = sum_gu, sum_gu

    mean_g, mean_gx = mean_g / count, mean_gx * r / count
    if MOVES:
        mean_g -= cov_xt * mean_h
        mean_gx -= cov_xt * mean_hx
    sum_dx = tl.zeros(x[0].shape, tl.float32)
    sum_dtx = sum_dx
    for i in tl.static_range(len(x)):
        gu, gtu, xc, tc = gradient_piece(tiles, i, statistics, scales, inputs, affine, lane, sizes, T, 2 * T.packed)
        dx = scale * gu - r * mean_g - xc * (r * r * mean_gx)
        if affine[2] is not None:
            dx += tscale * gtu
        if MOVES:
            turned = scale * gtu
            dx -= cov_xt * turned + tc * (r * r * mean_hx)
            dtx = turned - r * mean_h - xc * (r * r * mean_hx)
            store_piece(outs[1] + base, dtx, i, lane, sizes, T)
            if outs[3] is not None:
                sum_dtx += less(dtx, 0, i, lane, sizes, T)
        store_piece(outs[0] + base, dx, i, lane, sizes, T)
        if outs[2] is not None:
            sum_dx += less(dx, 0, i, lane, sizes, T)
    keep_shift(outs[2], sum_dx, sample, channels, lane)
    keep_shift(outs[3], sum_dtx, sample, channels, lane)
    keep_partials(PARTIAL, sample, lane, channels, (r * sum_gux, sum_gu, r * sum_gtux, sum_gtu), ASKED)
