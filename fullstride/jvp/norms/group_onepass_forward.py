"""GroupNorm's forward kernel for groups that stay on the chip; equations in `closed_form`, tiles in `chip_tiles`.

A program for each sample and block of groups; every tensor is read once.
"""

from typing import no_type_check

import triton
import triton.language as tl

from fullstride.jvp.norms.group_onepass_tiles import (
    less,
    load_tile,
    store_piece,
    totals,
    unpacked,
)
from fullstride.jvp.norms.group_tiles import keep_group_value, lanes, parameter
from fullstride.jvp.norms.sums import sigmoid


@triton.jit
@no_type_check
def means(x, t, TX, count, PAD: tl.constexpr, GROUPS: tl.constexpr):
    """<x> and <t>."""
    s_x = unpacked(x, 0, 0)
    if TX is not None:
        s_t = unpacked(t, 0, 0)
        for i in tl.static_range(1, len(x)):
            s_x += unpacked(x, i, 0)
            s_t += unpacked(t, i, 0)
        s_x, s_t = totals((s_x, s_t), PAD, GROUPS)
    else:
        for i in tl.static_range(1, len(x)):
            s_x += unpacked(x, i, 0)
        (s_x,) = totals((s_x,), PAD, GROUPS)
        s_t = s_x
    return s_x / count, s_t / count


@triton.jit
@no_type_check
def products(x, t, TX, mean, mean_t, there, pixels, count, PAD: tl.constexpr, GROUPS: tl.constexpr,
             PIECE: tl.constexpr, EXACT: tl.constexpr, STEP: tl.constexpr):  # fmt: skip
    """<(x - <x>)^2> and <(x - <x>) (t - <t>)>."""
    s_xx = tl.zeros(x[0].shape, tl.float32)
    s_xt = s_xx
    for i in tl.static_range(len(x)):
        xc = less(unpacked(x, i, STEP), mean, i, there, pixels, PIECE, EXACT)
        s_xx += xc * xc
        if TX is not None:
            s_xt += xc * (unpacked(t, i, STEP) - mean_t)
    if TX is not None:
        s_xx, s_xt = totals((s_xx, s_xt), PAD, GROUPS)
    else:
        (s_xx,) = totals((s_xx,), PAD, GROUPS)
        s_xt = s_xx
    return s_xx / count, s_xt / count


@triton.jit
@no_type_check
def forward_kernel(X, TX, W, B, TW, TB, Y, TY, MEAN, RSTD, moving, blocks, groups, channels, pixels, eps,
                   CPG: tl.constexpr, PAD: tl.constexpr, GROUPS: tl.constexpr, PIECES: tl.constexpr,
                   PIECE: tl.constexpr, LAST: tl.constexpr, EXACT: tl.constexpr, PACKED: tl.constexpr,
                   SILU: tl.constexpr):  # fmt: skip
    """y and ty of a sample's block of groups; only the first `moving` samples have a tangent, or None: all."""
    sample, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    channel, group, there, first = lanes(block, groups, CPG, PAD, GROUPS)
    base = sample.to(tl.int64) * channels * pixels
    count = CPG * 1.0 * pixels
    x = load_tile(X + base, channel, there, pixels, channels, PIECES, PIECE, LAST, EXACT)
    t, moves = x, None
    if moving is not None:
        moves = sample < moving
    if TX is not None:
        t = load_tile(TX + base, channel, there, pixels, channels, PIECES, PIECE, LAST, EXACT, moves)
    # Before the sums, whose barriers the loads would otherwise wait behind.
    w, b = parameter(W, channel, there, 1), parameter(B, channel, there, 0)
    tw, tb = parameter(TW, channel, there, 0), parameter(TB, channel, there, 0)

    mean, mean_t = means(x, t, TX, count, PAD, GROUPS)
    variance, covariance = products(x, t, TX, mean, mean_t, there, pixels, count, PAD, GROUPS, PIECE, EXACT, 1 * PACKED)
    r = tl.rsqrt(variance + eps)
    cov_xt, scale, tscale = covariance * r * r, w * r, tw * r
    for i in tl.static_range(PIECES):
        xc = unpacked(x, i, 2 * PACKED) - mean
        y = xc * scale + b
        if SILU:
            s = sigmoid(y)
            y *= s
            slope = s + y * (1 - s)
        store_piece(Y + base, y, i, channel, there, pixels, channels, PIECE, LAST, EXACT)
        if TY is not None:
            ty = tl.zeros_like(y)
            if TX is not None:
                ty = (unpacked(t, i, 2 * PACKED) - mean_t - xc * cov_xt) * scale
            if TW is not None:
                ty += xc * tscale
            if TB is not None:
                ty += tb
            if SILU:
                ty *= slope
            store_piece(TY + base, ty, i, channel, there, pixels, channels, PIECE, LAST, EXACT, moves)
    keep_group_value(MEAN, mean, sample, group, first, groups)
    keep_group_value(RSTD, r, sample, group, first, groups)
