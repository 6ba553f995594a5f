"""The forward kernel of GroupNorm for groups that stay on the chip; equations in `closed_form`.

A program for each sample and block of groups; every tensor is read once.
"""

from typing import no_type_check

import triton
import triton.language as tl

from fullstride.jvp.norms.group_onepass_tiles import less, load_tile, store_piece, totals, unpacked
from fullstride.jvp.norms.group_tiles import keep_group_value, lanes, over_groups, parameters, shift_of
from fullstride.jvp.norms.sums import sigmoid


@triton.jit
@no_type_check
def means(x, t, TX, count, T: tl.constexpr):
    """<x> and <t>."""
    s_x = unpacked(x, 0, 0)
    if TX is not None:
        s_t = unpacked(t, 0, 0)
        for i in tl.static_range(1, len(x)):
            s_x += unpacked(x, i, 0)
            s_t += unpacked(t, i, 0)
        s_x, s_t = totals((s_x, s_t), T)
    else:
        for i in tl.static_range(1, len(x)):
            s_x += unpacked(x, i, 0)
        (s_x,) = totals((s_x,), T)
        s_t = s_x
    return s_x / count, s_t / count


@triton.jit
@no_type_check
def products(x, t, TX, mean, mean_t, lane, sizes, count, T: tl.constexpr):
    """<(x - <x>)^2> and <(x - <x>) (t - <t>)>; each mean may be one of each lane."""
    s_xx = tl.zeros(x[0].shape, tl.float32)
    s_xt = s_xx
    for i in tl.static_range(len(x)):
        xc = less(unpacked(x, i, 1 * T.packed), mean, i, lane, sizes, T)
        s_xx += xc * xc
        if TX is not None:
            s_xt += xc * (unpacked(t, i, 1 * T.packed) - mean_t)
    if TX is not None:
        s_xx, s_xt = totals((s_xx, s_xt), T)
    else:
        (s_xx,) = totals((s_xx,), T)
        s_xt = s_xx
    return s_xx / count, s_xt / count


@triton.jit
@no_type_check
def forward_kernel(x, affine, y, kept, moving, shifts, blocks, sizes, eps, T: tl.constexpr):
    """y and ty of a sample's block of groups; only the first `moving` samples have a tangent, or None: all.

    Shifts are those of x and of its tangent, or None. The other arguments are those of `group_twopass_forward`.
    """
    groups, channels, pixels = sizes
    sample, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    lane = lanes(block, groups, T)
    base = sample.to(tl.int64) * channels * pixels
    count = T.cpg * 1.0 * pixels
    tile = load_tile(x[0] + base, lane, sizes, T)
    t, moves = tile, None
    if moving is not None:
        moves = sample < moving
    if x[1] is not None:
        t = load_tile(x[1] + base, lane, sizes, T, moves)
    # Before the sums: the loads would otherwise wait behind their barriers.
    w, b, tw, tb = parameters(affine, lane)

    mean, mean_t = means(tile, t, x[1], count, T)
    # What is taken from x and t as they lie: x + s less its mean is x less (its mean - s).
    centre, centre_t = mean, mean_t
    if shifts[0] is not None:
        s = shift_of(shifts[0], sample, channels, lane)
        mean += over_groups(s, T) / T.cpg
        centre = mean - s
    if shifts[1] is not None:
        st = shift_of(shifts[1], sample, channels, lane, moves)
        centre_t = mean_t + over_groups(st, T) / T.cpg - st
    variance, covariance = products(tile, t, x[1], centre, centre_t, lane, sizes, count, T)
    r = tl.rsqrt(variance + eps)
    cov_xt, scale, tscale = covariance * r * r, w * r, tw * r
    for i in tl.static_range(len(tile)):
        xc = unpacked(tile, i, 2 * T.packed) - centre
        out = xc * scale + b
        if T.silu:
            s = sigmoid(out)
            out *= s
            slope = s + out * (1 - s)
        store_piece(y[0] + base, out, i, lane, sizes, T)
        if y[1] is not None:
            ty = tl.zeros_like(out)
            if x[1] is not None:
                ty = (unpacked(t, i, 2 * T.packed) - centre_t - xc * cov_xt) * scale
            if affine[2] is not None:
                ty += xc * tscale
            if affine[3] is not None:
                ty += tb
            if T.silu:
                ty *= slope
            store_piece(y[1] + base, ty, i, lane, sizes, T, moves)
    keep_group_value(kept[0], mean, sample, lane, groups)
    keep_group_value(kept[1], r, sample, lane, groups)
