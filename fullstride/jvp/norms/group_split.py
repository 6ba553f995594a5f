"""GroupNorm with a sample's pixels split among programs, for few and large groups; equations in `closed_form`.

A chunk is `length` pixels; the kernels run one after another, each chunk's sums going through memory. Forward:
`moments_kernel`, `apply_kernel`. Backward: `moments_kernel` if there is a tangent, `sums_kernel`, `gradients_kernel`.
"""

from typing import no_type_check

import triton
import triton.language as tl

from fullstride.jvp.norms.group_tiles import group_value, keep_group_value, lanes, over_pixels, parameter
from fullstride.jvp.norms.group_twopass_backward import gradient_sums, gradients, group_means, keep_partials
from fullstride.jvp.norms.group_twopass_forward import apply, moments


@triton.jit
@no_type_check
def moments_kernel(X, TX, MOMENTS, blocks, chunks, length, groups, channels, pixels, CPG: tl.constexpr,
                   PAD: tl.constexpr, GROUPS: tl.constexpr, PIXELS: tl.constexpr, LAST: tl.constexpr,
                   STAGES: tl.constexpr):  # fmt: skip
    """`moments` of a chunk of the pixels into MOMENTS (4, samples, chunks, groups)."""
    chunk, place = tl.program_id(0) % chunks, tl.program_id(0) // chunks
    sample, block = place // blocks, place % blocks
    channel, group, there, first = lanes(block, groups, CPG, PAD, GROUPS)
    base = sample.to(tl.int64) * channels * pixels
    end = tl.minimum(pixels, chunk * length + length)
    mean, squares, mean_t, products = moments(
        X + base, None if TX is None else TX + base, channel, there, chunk * length, end, pixels, channels,
        CPG, PAD, GROUPS, PIXELS, LAST, STAGES,
    )  # fmt: skip
    row, plane = sample * chunks + chunk, tl.num_programs(0) // blocks * groups
    keep_group_value(MOMENTS, mean, row, group, first, groups)
    keep_group_value(MOMENTS + plane, squares, row, group, first, groups)
    keep_group_value(MOMENTS + 2 * plane, mean_t, row, group, first, groups)
    keep_group_value(MOMENTS + 3 * plane, products, row, group, first, groups)


@triton.jit
@no_type_check
def combine(MOMENTS, sample, group, there, samples, groups, chunks, length, pixels, CPG: tl.constexpr,
            CHUNKS: tl.constexpr):  # fmt: skip
    """The moments of whole groups, [1, lanes], from those of their chunks (Chan, Golub and LeVeque 1979)."""
    chunk = tl.arange(0, CHUNKS)[:, None]
    at = MOMENTS + (sample * chunks + chunk) * groups + group
    inside, plane = (chunk < chunks) & there, samples * chunks * groups
    count = CPG * tl.maximum(tl.minimum(pixels - chunk * length, length), 0).to(tl.float32)
    whole = CPG * 1.0 * pixels
    means, means_t = tl.load(at, mask=inside, other=0), tl.load(at + 2 * plane, mask=inside, other=0)
    mean = tl.sum(count * means, axis=0)[None, :] / whole
    mean_t = tl.sum(count * means_t, axis=0)[None, :] / whole
    off = means - mean
    squares = tl.load(at + plane, mask=inside, other=0) + count * off * off
    products = tl.load(at + 3 * plane, mask=inside, other=0) + count * off * (means_t - mean_t)
    return mean, tl.sum(squares, axis=0)[None, :] / whole, mean_t, tl.sum(products, axis=0)[None, :] / whole


@triton.jit
@no_type_check
def apply_kernel(X, TX, W, B, TW, TB, Y, TY, MEAN, RSTD, MOMENTS, samples, blocks, chunks, length, groups, channels,
                 pixels, eps, CPG: tl.constexpr, PAD: tl.constexpr, GROUPS: tl.constexpr, PIXELS: tl.constexpr,
                 LAST: tl.constexpr, SILU: tl.constexpr, CHUNKS: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """y and ty of a chunk of the pixels."""
    chunk, place = tl.program_id(0) % chunks, tl.program_id(0) // chunks
    sample, block = place // blocks, place % blocks
    channel, group, there, first = lanes(block, groups, CPG, PAD, GROUPS)
    mean, variance, mean_t, covariance = combine(
        MOMENTS, sample, group, there, samples, groups, chunks, length, pixels, CPG, CHUNKS
    )
    r = tl.rsqrt(variance + eps)
    base = sample.to(tl.int64) * channels * pixels
    apply(
        X + base, None if TX is None else TX + base, Y + base, None if TY is None else TY + base,
        TW, TB, mean, r, mean_t, covariance * r,
        parameter(W, channel, there, 1), parameter(B, channel, there, 0),
        parameter(TW, channel, there, 0), parameter(TB, channel, there, 0),
        channel, there, chunk * length, tl.minimum(pixels, chunk * length + length), pixels, channels,
        PIXELS, LAST, SILU, STAGES,
    )  # fmt: skip
    if chunk == 0:
        keep_group_value(MEAN, mean, sample, group, first, groups)
        keep_group_value(RSTD, r, sample, group, first, groups)


@triton.jit
@no_type_check
def sums_kernel(GY, GTY, X, TX, W, B, TW, TB, MEAN, RSTD, MOMENTS, SUMS, PARTIAL, samples, blocks, chunks, length,
                groups, channels, pixels, DW: tl.constexpr, DB: tl.constexpr, DTW: tl.constexpr, DTB: tl.constexpr,
                CPG: tl.constexpr, PAD: tl.constexpr, GROUPS: tl.constexpr, PIXELS: tl.constexpr, LAST: tl.constexpr,
                SILU: tl.constexpr, CHUNKS: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """`gradient_sums` of a chunk of the pixels into SUMS (samples, chunks, 5, channels), and its partial sums."""
    chunk, place = tl.program_id(0) % chunks, tl.program_id(0) // chunks
    sample, block = place // blocks, place % blocks
    channel, group, there, _ = lanes(block, groups, CPG, PAD, GROUPS)
    r = group_value(RSTD, sample, block, group, there, groups, GROUPS)
    mean_t, rc = r, 0.0
    if TX is not None:
        _, _, mean_t, covariance = combine(
            MOMENTS, sample, group, there, samples, groups, chunks, length, pixels, CPG, CHUNKS
        )
        rc = r * r * covariance
    base = sample.to(tl.int64) * channels * pixels
    sums = gradient_sums(
        GY + base, None if GTY is None else GTY + base, X + base, None if TX is None else TX + base, TW, TB,
        group_value(MEAN, sample, block, group, there, groups, GROUPS), r, mean_t, rc,
        parameter(W, channel, there, 1), parameter(B, channel, there, 0),
        parameter(TW, channel, there, 0), parameter(TB, channel, there, 0),
        channel, there, chunk * length, tl.minimum(pixels, chunk * length + length), pixels, channels,
        GROUPS * PAD, PIXELS, LAST, SILU, STAGES,
    )  # fmt: skip
    row = sample * chunks + chunk
    to = SUMS + (row * 5).to(tl.int64) * channels + channel
    for i in tl.static_range(5):
        tl.store(to + i * channels, sums[i], mask=there)
    keep_partials(PARTIAL, row, channel, there, channels, sums, DW, DB, DTW, DTB)


@triton.jit
@no_type_check
def chunk_sum(SUMS, sample, chunks, which: tl.constexpr, channel, there, channels, CHUNKS: tl.constexpr):
    """One of the five sums of each lane, over all chunks."""
    chunk = tl.arange(0, CHUNKS)[:, None]
    at = SUMS + ((sample * chunks + chunk) * 5 + which).to(tl.int64) * channels + channel
    return over_pixels(tl.load(at, mask=(chunk < chunks) & there, other=0))


@triton.jit
@no_type_check
def gradients_kernel(GY, GTY, X, TX, W, B, TW, TB, MEAN, RSTD, MOMENTS, SUMS, DX, DTX, samples, blocks, chunks, length,
                     groups, channels, pixels, CPG: tl.constexpr, PAD: tl.constexpr, GROUPS: tl.constexpr,
                     PIXELS: tl.constexpr, LAST: tl.constexpr, SILU: tl.constexpr, CHUNKS: tl.constexpr,
                     STAGES: tl.constexpr):  # fmt: skip
    """dx and dtx of a chunk of the pixels."""
    FULL: tl.constexpr = GTY is not None
    chunk, place = tl.program_id(0) % chunks, tl.program_id(0) // chunks
    sample, block = place // blocks, place % blocks
    channel, group, there, _ = lanes(block, groups, CPG, PAD, GROUPS)
    w, b = parameter(W, channel, there, 1), parameter(B, channel, there, 0)
    tw, tb = parameter(TW, channel, there, 0), parameter(TB, channel, there, 0)
    r = group_value(RSTD, sample, block, group, there, groups, GROUPS)
    mean_t, rc = r, 0.0
    if TX is not None:
        _, _, mean_t, covariance = combine(
            MOMENTS, sample, group, there, samples, groups, chunks, length, pixels, CPG, CHUNKS
        )
        rc = r * r * covariance
    sum_gu = chunk_sum(SUMS, sample, chunks, 0, channel, there, channels, CHUNKS)
    sum_gux = chunk_sum(SUMS, sample, chunks, 1, channel, there, channels, CHUNKS)
    sum_gtu, sum_gtux, sum_gtut = sum_gu, sum_gu, sum_gu
    if FULL:
        sum_gtu = chunk_sum(SUMS, sample, chunks, 2, channel, there, channels, CHUNKS)
        sum_gtux = chunk_sum(SUMS, sample, chunks, 3, channel, there, channels, CHUNKS)
        sum_gtut = chunk_sum(SUMS, sample, chunks, 4, channel, there, channels, CHUNKS)
    sums = sum_gu, sum_gux, sum_gtu, sum_gtux, sum_gtut
    means = group_means(sums, w, tw, rc, CPG * 1.0 * pixels, FULL, PAD, GROUPS)
    base = sample.to(tl.int64) * channels * pixels
    gradients(
        GY + base, None if GTY is None else GTY + base, X + base, None if TX is None else TX + base,
        DX + base, None if DTX is None else DTX + base, TW, TB,
        group_value(MEAN, sample, block, group, there, groups, GROUPS), r, mean_t, rc, means,
        w, b, tw, tb, channel, there, chunk * length, tl.minimum(pixels, chunk * length + length), pixels, channels,
        PIXELS, LAST, SILU, STAGES,
    )  # fmt: skip
