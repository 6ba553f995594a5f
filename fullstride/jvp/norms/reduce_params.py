"""The second step of the parameters' gradients: partial sums of the first, added in a fixed order."""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from fullstride.jvp.norms.closed_form import Affine
from fullstride.jvp.norms.launch import ceil_div, launch, overlaps, padded

# At least 64 bytes of a row, and so many rows at once that few steps follow one another; few rows take more columns.
LEAST_COLUMNS, MOST_COLUMNS, MAX_DEPTH, TILE, WARP_ELEMENTS = 16, 256, 512, 2048, 1024


@triton.jit
@no_type_check
def sum_kernel(PARTIAL, OUTS, parts, D, DEPTH: tl.constexpr, COLUMNS: tl.constexpr, EARLY: tl.constexpr):
    """OUTS[k][b] = sum over p of PARTIAL[b, p, k]; EARLY: the kernel that makes these may not have ended."""
    if EARLY:
        gdc_wait()
    k, b = tl.program_id(1), tl.program_id(2)
    count = tl.num_programs(1)
    part, col = tl.arange(0, DEPTH)[:, None], tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    total = tl.zeros([DEPTH, COLUMNS], tl.float32)
    for start in range(0, parts, DEPTH):
        p = start + part
        at = ((b * parts + p) * count + k).to(tl.int64) * D + col
        total += tl.load(PARTIAL + at, mask=(p < parts) & (col < D), other=0)
    col = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    result = tl.sum(total, axis=0)
    for i in tl.static_range(len(OUTS)):
        if k == i:
            tl.store(OUTS[i] + b.to(tl.int64) * D + col, result.to(OUTS[i].dtype.element_ty), mask=col < D)


def partial_sums(x: Tensor, affine: Affine, batches: int, parts: int) -> tuple[Tensor | None, list[bool]]:
    """Allocate the parameters' gradients of each part, None for an absent parameter; and tell which are present."""
    asked = [p is not None for p in affine]
    width = next((p.shape[-1] for p in affine if p is not None), 0)
    size = batches, parts, sum(asked), width
    return (torch.empty(size, device=x.device, dtype=torch.float32) if any(asked) else None), asked


def summed(partial: Tensor | None, affine: Affine) -> tuple[Tensor | None, ...]:
    """Gradients of the parameters that are present."""
    found = iter([] if partial is None else sum_partials(partial, [p for p in affine if p is not None]))
    return tuple(None if p is None else next(found) for p in affine)


def sum_partials(partial: Tensor, models: list[Tensor]) -> list[Tensor]:
    """(batches, parts, len(models), D) summed over the parts: a gradient for each model, in its shape and format.

    Deterministic, and one launch. No two lie in one tensor, which an operator's results must not.
    """
    batches, parts, count, D = partial.shape
    outs = [torch.empty(m.shape, device=partial.device, dtype=m.dtype) for m in models]
    depth = min(MAX_DEPTH, padded(parts))
    columns = min(MOST_COLUMNS, max(LEAST_COLUMNS, TILE // depth))
    warps = max(1, depth * columns // WARP_ELEMENTS)
    grid, early = (ceil_div(D, columns), count, batches), overlaps(partial)
    launch(sum_kernel, grid, partial, tuple(outs), parts, D, depth, columns, early, warps=warps, early=early)
    return outs
