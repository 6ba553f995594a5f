"""GroupNorm with a sample's pixels split among programs, for few and large groups; equations in `closed_form`.

A chunk is `length` pixels; the kernels run one after another, each chunk's sums going through memory. Forward:
`moments_kernel`, `apply_kernel`. Backward: `moments_kernel` if there is a tangent, `sums_kernel`, `gradients_kernel`.
"""

from typing import no_type_check

import triton
import triton.language as tl

from fullstride.jvp.norms.group_tiles import (
    group_value,
    keep_group_value,
    keep_partials,
    lanes,
    over_pixels,
    parameters,
)
from fullstride.jvp.norms.group_twopass_backward import gradient_sums, gradients, group_means, of_parameters
from fullstride.jvp.norms.group_twopass_forward import apply, moments


@triton.jit
@no_type_check
def place(plan, sizes, T: tl.constexpr):
    """Sample, block of groups, chunk, lanes, where the sample begins, and the chunk's pixels: the first and the end."""
    _, blocks, chunks, length = plan
    groups, channels, pixels = sizes
    chunk, rest = tl.program_id(0) % chunks, tl.program_id(0) // chunks
    sample, block = rest // blocks, rest % blocks
    base = sample.to(tl.int64) * channels * pixels
    end = tl.minimum(pixels, chunk * length + length)
    return sample, block, chunk, lanes(block, groups, T), base, chunk * length, end


@triton.jit
@no_type_check
def moments_kernel(x, MOMENTS, plan, sizes, T: tl.constexpr):
    """`moments` of a chunk of the pixels into MOMENTS (4, samples, chunks, groups).

    The plan is samples, blocks of groups, chunks and the pixels of a chunk; sizes are groups, channels and pixels.
    """
    sample, _, chunk, lane, base, first_pixel, end = place(plan, sizes, T)
    found = moments(x[0], x[1], base, lane, first_pixel, end, sizes, T)
    row, plane = sample * plan[2] + chunk, tl.num_programs(0) // plan[1] * sizes[0]
    for i in tl.static_range(4):
        keep_group_value(MOMENTS + i * plane, found[i], row, lane, sizes[0])


@triton.jit
@no_type_check
def combine(MOMENTS, sample, lane, plan, sizes, T: tl.constexpr):
    """The moments of whole groups, [1, lanes], from those of their chunks (Chan, Golub and LeVeque 1979)."""
    samples, _, chunks, length = plan
    groups, _, pixels = sizes
    chunk = tl.arange(0, T.chunks)[:, None]
    at = MOMENTS + (sample * chunks + chunk) * groups + lane[1]
    inside, plane = (chunk < chunks) & lane[2], samples * chunks * groups
    count = T.cpg * tl.maximum(tl.minimum(pixels - chunk * length, length), 0).to(tl.float32)
    whole = T.cpg * 1.0 * pixels
    means, means_t = tl.load(at, mask=inside, other=0), tl.load(at + 2 * plane, mask=inside, other=0)
    mean = tl.sum(count * means, axis=0)[None, :] / whole
    mean_t = tl.sum(count * means_t, axis=0)[None, :] / whole
    off = means - mean
    squares = tl.load(at + plane, mask=inside, other=0) + count * off * off
    products = tl.load(at + 3 * plane, mask=inside, other=0) + count * off * (means_t - mean_t)
    return mean, tl.sum(squares, axis=0)[None, :] / whole, mean_t, tl.sum(products, axis=0)[None, :] / whole


@triton.jit
@no_type_check
def apply_kernel(x, affine, y, kept, MOMENTS, plan, sizes, eps, T: tl.constexpr):
    """y and ty of a chunk of the pixels."""
    sample, _, chunk, lane, base, first_pixel, end = place(plan, sizes, T)
    mean, variance, mean_t, covariance = combine(MOMENTS, sample, lane, plan, sizes, T)
    r = tl.rsqrt(variance + eps)
    apply(x, affine, y, base, (mean, r, mean_t, covariance * r), lane, first_pixel, end, sizes, T)
    if chunk == 0:
        keep_group_value(kept[0], mean, sample, lane, sizes[0])
        keep_group_value(kept[1], r, sample, lane, sizes[0])


@triton.jit
@no_type_check
def statistics(TX, kept, MOMENTS, sample, block, lane, plan, sizes, T: tl.constexpr):
    """<x>, r, <t> and r <xh t> of whole groups."""
    r = group_value(kept[1], sample, block, lane, sizes[0], T)
    mean_t, rc = r, 0.0
    if TX is not None:
        _, _, mean_t, covariance = combine(MOMENTS, sample, lane, plan, sizes, T)
        rc = r * r * covariance
    return group_value(kept[0], sample, block, lane, sizes[0], T), r, mean_t, rc


@triton.jit
@no_type_check
def sums_kernel(inputs, affine, kept, MOMENTS, SUMS, PARTIAL, plan, sizes, ASKED: tl.constexpr, T: tl.constexpr):
    """`gradient_sums` of a chunk of the pixels into SUMS (samples, chunks, 5, channels), and its partial sums."""
    sample, block, chunk, lane, base, first_pixel, end = place(plan, sizes, T)
    known = statistics(inputs[3], kept, MOMENTS, sample, block, lane, plan, sizes, T)
    values = parameters(affine, lane)
    sums = gradient_sums(inputs, affine, values, base, known, lane, first_pixel, end, sizes, T)
    row = sample * plan[2] + chunk
    to = SUMS + (row * 5).to(tl.int64) * sizes[1] + lane[0]
    for i in tl.static_range(5):
        tl.store(to + i * sizes[1], sums[i], mask=lane[2])
    keep_partials(PARTIAL, row, lane, sizes[1], of_parameters(sums), ASKED)


@triton.jit
@no_type_check
def chunk_sum(SUMS, sample, chunks, which: tl.constexpr, lane, channels, T: tl.constexpr):
    """One of the five sums of each lane, over all chunks."""
    chunk = tl.arange(0, T.chunks)[:, None]
    at = SUMS + ((sample * chunks + chunk) * 5 + which).to(tl.int64) * channels + lane[0]
    return over_pixels(tl.load(at, mask=(chunk < chunks) & lane[2], other=0))


@triton.jit
@no_type_check
def gradients_kernel(inputs, affine, kept, MOMENTS, SUMS, outs, plan, sizes, T: tl.constexpr):
    """dx and dtx of a chunk of the pixels."""
    FULL: tl.constexpr = inputs[1] is not None
    sample, block, _, lane, base, first_pixel, end = place(plan, sizes, T)
    values = parameters(affine, lane)
    known = statistics(inputs[3], kept, MOMENTS, sample, block, lane, plan, sizes, T)
    sums = ()
    for i in tl.static_range(5):
        # Without a gradient of the tangent there are two.
        sums += (chunk_sum(SUMS, sample, plan[2], i if FULL or i < 2 else 0, lane, sizes[1], T),)
    means = group_means(sums, values, known[3], T.cpg * 1.0 * sizes[2], FULL, T)
    gradients(inputs, affine, values, outs, base, known, means, lane, first_pixel, end, sizes, T)
