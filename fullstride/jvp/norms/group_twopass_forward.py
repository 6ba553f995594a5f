"""GroupNorm's forward kernel for groups that no chip holds; equations in `closed_form`, tiles in `group_tiles`.

A program for each sample and block of groups walks twice over its pixels. If there are too few groups for that, see
`group_split`.
"""

from typing import no_type_check

import triton
import triton.language as tl

from fullstride.jvp.norms.group_tiles import (
    fetch,
    keep_group_value,
    lanes,
    parameters,
    positions,
    silu,
    tangent,
    total,
)

# Pixels whose mean is the shift of the sums: enough that the variance of any group keeps its digits.
HEAD: tl.constexpr = tl.constexpr(32)


@triton.jit
@no_type_check
def moments(X, TX, base, lane, first_pixel, end, sizes, T: tl.constexpr):
    """Compute over the pixels from first_pixel to end: <x>, sum (x - <x>)^2, <t>, sum (x - <x>) (t - <t>).

    From sums of x and t less a first guess of their means, so that a mean far above the deviation costs no digits.
    """
    channel, _, there, _ = lane
    head = first_pixel + tl.arange(0, HEAD)[:, None]
    in_head = (head < end) & there
    head_at = positions(head, channel, sizes, T)
    few = T.cpg * tl.minimum(end - first_pixel, HEAD).to(tl.float32)
    shift = total(fetch(X + base + head_at, in_head), T) / few
    shift_t = shift
    if TX is not None:
        shift_t = total(fetch(TX + base + head_at, in_head), T) / few

    zero = tl.full([T.pixels, T.groups * T.pad], 0.0, tl.float32)
    s_x, s_xx, s_t, s_xt = zero, zero, zero, zero
    for start in tl.range(first_pixel, end, T.pixels, num_stages=T.stages):
        pixel = start + tl.arange(0, T.pixels)[:, None]
        inside = (pixel < end) & there
        at = positions(pixel, channel, sizes, T)
        x = tl.where(inside, fetch(X + base + at, inside) - shift, 0)
        s_x += x
        s_xx += x * x
        if TX is not None:
            t = tl.where(inside, fetch(TX + base + at, inside) - shift_t, 0)
            s_t += t
            s_xt += x * t
    count = T.cpg * (end - first_pixel).to(tl.float32)
    x = total(s_x, T)
    squares = total(s_xx, T) - x * x / count
    t, products = x, x
    if TX is not None:
        t = total(s_t, T)
        products = total(s_xt, T) - x * t / count
    return shift + x / count, squares, shift_t + t / count, products


@triton.jit
@no_type_check
def apply(x, affine, y, base, statistics, lane, first_pixel, end, sizes, T: tl.constexpr):
    """y and ty of the pixels from first_pixel to end; the statistics are <x>, r, <t> and <xh t>."""
    mean, r, mean_t, mean_xt = statistics
    values = parameters(affine, lane)
    for start in tl.range(first_pixel, end, T.pixels, num_stages=T.stages):
        pixel = start + tl.arange(0, T.pixels)[:, None]
        inside = (pixel < end) & lane[2]
        at = positions(pixel, lane[0], sizes, T)
        xh = (fetch(x[0] + base + at, inside) - mean) * r
        txh = tl.zeros_like(xh)
        if x[1] is not None:
            txh = r * (fetch(x[1] + base + at, inside) - mean_t - xh * mean_xt)
        out = xh * values[0] + values[1]
        slope = 1.0
        if T.silu:
            out, slope, _ = silu(out)
        tl.store(y[0] + base + at, out.to(y[0].dtype.element_ty), mask=inside)
        if y[1] is not None:
            ty = slope * tangent(xh, txh, values, affine)
            tl.store(y[1] + base + at, ty.to(y[1].dtype.element_ty), mask=inside)


@triton.jit
@no_type_check
def forward_kernel(x, affine, y, kept, blocks, sizes, eps, T: tl.constexpr):
    """A sample's block of groups.

    Of x and y each with its tangent, weight and bias with theirs, `kept` mean and r, and sizes: groups, channels,
    pixels; what is absent is None.
    """
    groups, channels, pixels = sizes
    sample, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    lane = lanes(block, groups, T)
    base = sample.to(tl.int64) * channels * pixels
    count = T.cpg * 1.0 * pixels
    mean, squares, mean_t, products = moments(x[0], x[1], base, lane, 0, pixels, sizes, T)
    r = tl.rsqrt(squares / count + eps)
    apply(x, affine, y, base, (mean, r, mean_t, products * r / count), lane, 0, pixels, sizes, T)
    keep_group_value(kept[0], mean, sample, lane, groups)
    keep_group_value(kept[1], r, sample, lane, groups)
