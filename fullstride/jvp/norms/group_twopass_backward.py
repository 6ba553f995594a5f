"""GroupNorm's backward kernels; equations in `closed_form`, tiles in `group_tiles`.

Two stages of sums: of t, for c and txh, if there is a tangent; then five per channel, of gu, gu xh, gtu, gtu xh and
gtu txh, which weighted and added give a group's means and as they are the parameters' gradients.
A program for each sample and block of groups walks over its pixels once for each stage and once for dx and dtx, where
the groups do not stay on the chip (see `group_onepass_backward`). If there are too few groups for that, see
`group_split`. GTY None: the detached tangent; TX, TW and TB are then None too.
"""

from typing import no_type_check

import triton
import triton.language as tl

from fullstride.jvp.norms.group_tiles import (
    fetch,
    group_value,
    keep_partials,
    lanes,
    over_groups,
    over_pixels,
    parameters,
    positions,
    silu,
    tangent,
)
from fullstride.jvp.norms.group_twopass_forward import moments


@triton.jit
@no_type_check
def group_means(sums, values, rc, count, FULL: tl.constexpr, T: tl.constexpr):
    """<g>, what xh is taken times from g, <h> and d, from the sums of each lane; rc is r <xh t>."""
    sum_gu, sum_gux, sum_gtu, sum_gtux, sum_gtut = sums
    w, _, tw, _ = values
    if FULL:
        mean_g = over_groups(w * sum_gu + tw * sum_gtu, T) / count
        mean_hx = over_groups(w * sum_gtux, T) / count
        mean_h = over_groups(w * sum_gtu, T) / count
        mean_gx = over_groups(w * (sum_gux + sum_gtut) + tw * sum_gtux, T) / count - rc * mean_hx
    else:
        mean_g = over_groups(w * sum_gu, T) / count
        mean_gx = over_groups(w * sum_gux, T) / count
        mean_h, mean_hx = mean_gx, mean_gx
    return mean_g, mean_gx, mean_h, mean_hx


@triton.jit
@no_type_check
def gradient_tile(inputs, affine, values, base, statistics, at, inside, T: tl.constexpr):
    """gu, gtu, xh and txh of a tile; the statistics are <x>, r, <t> and r <xh t>."""
    FULL: tl.constexpr = inputs[1] is not None
    mean, r, mean_t, rc = statistics
    gy = fetch(inputs[0] + base + at, inside)
    xh = (fetch(inputs[2] + base + at, inside) - mean) * r
    gty, txh = gy, tl.zeros_like(xh)
    if FULL:
        gty = fetch(inputs[1] + base + at, inside)
    if inputs[3] is not None:
        txh = r * (fetch(inputs[3] + base + at, inside) - mean_t) - xh * rc
    gu, gtu = gy, gty
    if T.silu:
        _, slope, curvature = silu(xh * values[0] + values[1])
        gu = gy * slope
        if FULL:
            gu += gty * tangent(xh, txh, values, affine) * curvature
            gtu = gty * slope
    return gu, gtu, xh, txh


@triton.jit
@no_type_check
def gradient_sums(inputs, affine, values, base, statistics, lane, first_pixel, end, sizes, T: tl.constexpr):
    """The five sums of each lane over the pixels from first_pixel to end."""
    zero = tl.full([T.pixels, T.groups * T.pad], 0.0, tl.float32)
    sum_gu, sum_gux, sum_gtu, sum_gtux, sum_gtut = zero, zero, zero, zero, zero
    for start in tl.range(first_pixel, end, T.pixels, num_stages=T.stages):
        pixel = start + tl.arange(0, T.pixels)[:, None]
        inside = (pixel < end) & lane[2]
        at = positions(pixel, lane[0], sizes, T)
        gu, gtu, xh, txh = gradient_tile(inputs, affine, values, base, statistics, at, inside, T)
        sum_gu += gu
        sum_gux += gu * xh
        if inputs[1] is not None:
            sum_gtu += gtu
            sum_gtux += gtu * xh
            if inputs[3] is not None:
                sum_gtut += gtu * txh
    return over_pixels(sum_gu), over_pixels(sum_gux), over_pixels(sum_gtu), over_pixels(sum_gtux), over_pixels(sum_gtut)


@triton.jit
@no_type_check
def gradients(inputs, affine, values, outs, base, statistics, means, lane, first_pixel, end, sizes, T: tl.constexpr):
    """dx and dtx of the pixels from first_pixel to end."""
    w, _, tw, _ = values
    _, r, _, rc = statistics
    mean_g, mean_gx, mean_h, mean_hx = means
    for start in tl.range(first_pixel, end, T.pixels, num_stages=T.stages):
        pixel = start + tl.arange(0, T.pixels)[:, None]
        inside = (pixel < end) & lane[2]
        at = positions(pixel, lane[0], sizes, T)
        gu, gtu, xh, txh = gradient_tile(inputs, affine, values, base, statistics, at, inside, T)
        dx = gu * w - mean_g - xh * mean_gx
        if inputs[1] is not None:
            if affine[2] is not None:
                dx += gtu * tw
            if outs[1] is not None:
                h = gtu * w - mean_h
                dx -= rc * h + mean_hx * txh
                dtx = (r * (h - xh * mean_hx)).to(outs[1].dtype.element_ty)
                tl.store(outs[1] + base + at, dtx, mask=inside)
        tl.store(outs[0] + base + at, (r * dx).to(outs[0].dtype.element_ty), mask=inside)


@triton.jit
@no_type_check
def of_parameters(sums):
    """dw, db, dtw and dtb of the sums of each lane."""
    sum_gu, sum_gux, sum_gtu, sum_gtux, sum_gtut = sums
    return sum_gux + sum_gtut, sum_gu, sum_gtux, sum_gtu


@triton.jit
@no_type_check
def backward_kernel(inputs, affine, kept, outs, PARTIAL, blocks, sizes, ASKED: tl.constexpr, T: tl.constexpr):
    """A sample's block of groups; inputs are gy, gty, x and tx, outs dx and dtx, the rest is as in `forward_kernel`."""
    groups, channels, pixels = sizes
    sample, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    lane = lanes(block, groups, T)
    values = parameters(affine, lane)
    mean = group_value(kept[0], sample, block, lane, groups, T)
    r = group_value(kept[1], sample, block, lane, groups, T)
    base = sample.to(tl.int64) * channels * pixels
    count = T.cpg * 1.0 * pixels
    mean_t, rc = mean, 0.0
    if inputs[3] is not None:
        _, _, mean_t, products = moments(inputs[2], inputs[3], base, lane, 0, pixels, sizes, T)
        rc = r * r * products / count
    statistics = mean, r, mean_t, rc
    sums = gradient_sums(inputs, affine, values, base, statistics, lane, 0, pixels, sizes, T)
    means = group_means(sums, values, rc, count, inputs[1] is not None, T)
    gradients(inputs, affine, values, outs, base, statistics, means, lane, 0, pixels, sizes, T)
    keep_partials(PARTIAL, sample, lane, channels, of_parameters(sums), ASKED)
