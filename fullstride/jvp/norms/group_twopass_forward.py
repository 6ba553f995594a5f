"""GroupNorm's forward kernel for groups that no chip holds; equations in `closed_form`, tiles in `group_tiles`.

A program for each sample and block of groups walks twice over its pixels. Where there are too few groups for that see
`group_split`.
"""

from typing import no_type_check

import triton
import triton.language as tl

from fullstride.jvp.norms.group_tiles import (
    fetch,
    keep_group_value,
    lanes,
    parameter,
    positions,
    silu,
    tangent,
    total,
)

# Pixels whose mean is the shift of the sums: enough that the variance of any group keeps its digits.
HEAD: tl.constexpr = tl.constexpr(32)


@triton.jit
@no_type_check
def moments(X, TX, channel, there, first_pixel, end, pixels, channels, CPG: tl.constexpr, PAD: tl.constexpr,
            GROUPS: tl.constexpr, PIXELS: tl.constexpr, LAST: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """Over the pixels from first_pixel to end: <x>, sum (x - <x>)^2, <t>, sum (x - <x>) (t - <t>).

    From sums of x and t less a first guess of their means, so that a mean far above the deviation costs no digits.
    """
    head = first_pixel + tl.arange(0, HEAD)[:, None]
    in_head = (head < end) & there
    head_at = positions(head, channel, pixels, channels, LAST)
    few = CPG * tl.minimum(end - first_pixel, HEAD).to(tl.float32)
    shift = total(fetch(X + head_at, in_head), PAD, GROUPS) / few
    shift_t = shift
    if TX is not None:
        shift_t = total(fetch(TX + head_at, in_head), PAD, GROUPS) / few

    zero = tl.zeros([PIXELS, GROUPS * PAD], tl.float32)
    s_x, s_xx, s_t, s_xt = zero, zero, zero, zero
    for start in tl.range(first_pixel, end, PIXELS, num_stages=STAGES):
        pixel = start + tl.arange(0, PIXELS)[:, None]
        inside = (pixel < end) & there
        at = positions(pixel, channel, pixels, channels, LAST)
        x = tl.where(inside, fetch(X + at, inside) - shift, 0)
        s_x += x
        s_xx += x * x
        if TX is not None:
            t = tl.where(inside, fetch(TX + at, inside) - shift_t, 0)
            s_t += t
            s_xt += x * t
    count = CPG * (end - first_pixel).to(tl.float32)
    x = total(s_x, PAD, GROUPS)
    squares = total(s_xx, PAD, GROUPS) - x * x / count
    t, products = x, x
    if TX is not None:
        t = total(s_t, PAD, GROUPS)
        products = total(s_xt, PAD, GROUPS) - x * t / count
    return shift + x / count, squares, shift_t + t / count, products


@triton.jit
@no_type_check
def write(Y, TY, TW, TB, at, inside, xh, txh, w, b, tw, tb, SILU: tl.constexpr):
    """y and ty of a tile of xh and txh."""
    y = xh * w + b
    slope = 1.0
    if SILU:
        y, slope, _ = silu(y)
    tl.store(Y + at, y.to(Y.dtype.element_ty), mask=inside)
    if TY is not None:
        ty = slope * tangent(xh, txh, w, tw, tb, TW, TB)
        tl.store(TY + at, ty.to(TY.dtype.element_ty), mask=inside)


@triton.jit
@no_type_check
def apply(X, TX, Y, TY, TW, TB, mean, r, mean_t, mean_xt, w, b, tw, tb, channel, there, first_pixel, end, pixels,
          channels, PIXELS: tl.constexpr, LAST: tl.constexpr, SILU: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """y and ty of the pixels from first_pixel to end; `mean_xt` is <xh t>."""
    for start in tl.range(first_pixel, end, PIXELS, num_stages=STAGES):
        pixel = start + tl.arange(0, PIXELS)[:, None]
        inside = (pixel < end) & there
        at = positions(pixel, channel, pixels, channels, LAST)
        xh = (fetch(X + at, inside) - mean) * r
        txh = tl.zeros_like(xh)
        if TX is not None:
            txh = r * (fetch(TX + at, inside) - mean_t - xh * mean_xt)
        write(Y, TY, TW, TB, at, inside, xh, txh, w, b, tw, tb, SILU)


@triton.jit
@no_type_check
def forward_kernel(X, TX, W, B, TW, TB, Y, TY, MEAN, RSTD, blocks, groups, channels, pixels, eps, CPG: tl.constexpr,
                   PAD: tl.constexpr, GROUPS: tl.constexpr, PIXELS: tl.constexpr, LAST: tl.constexpr,
                   SILU: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """A sample's block of groups."""
    sample, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    channel, group, there, first = lanes(block, groups, CPG, PAD, GROUPS)
    base = sample.to(tl.int64) * channels * pixels
    count = CPG * 1.0 * pixels
    x_at, tx_at = X + base, None if TX is None else TX + base
    mean, squares, mean_t, products = moments(
        x_at, tx_at, channel, there, 0, pixels, pixels, channels, CPG, PAD, GROUPS, PIXELS, LAST, STAGES
    )
    r = tl.rsqrt(squares / count + eps)
    apply(
        x_at, tx_at, Y + base, None if TY is None else TY + base, TW, TB, mean, r, mean_t, products * r / count,
        parameter(W, channel, there, 1), parameter(B, channel, there, 0),
        parameter(TW, channel, there, 0), parameter(TB, channel, there, 0),
        channel, there, 0, pixels, pixels, channels, PIXELS, LAST, SILU, STAGES,
    )  # fmt: skip
    keep_group_value(MEAN, mean, sample, group, first, groups)
    keep_group_value(RSTD, r, sample, group, first, groups)
