"""The mean of parts that lie in several places, in one pass."""

from typing import Any, no_type_check

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


@triton.jit
@no_type_check
def mean_kernel(own, rows, out, count, stride, RANK: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """A block of the mean of `rows` (SIZE, stride), `own` in place of row RANK; sums in fp32, in the rows' order."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(SIZE):
        place = own if i == RANK else rows + i * stride
        total += tl.load(place + at, mask=inside).to(tl.float32)
    tl.store(out + at, (total / SIZE).to(out.dtype.element_ty), mask=inside)


def mean_of(own: Tensor, rows: Tensor, rank: int, out: Tensor) -> None:
    """Fill `out` with the mean of some rows, of which one stands elsewhere.

    Args:
        own: (m,), in place of row `rank`, which is not read; may be `out`.
        rows: (n, m), whose columns lie one after the other.
        rank: which row `own` is.
        out: (m,), of the same dtype.

    """
    kernel: Any = mean_kernel
    grid = (triton.cdiv(out.numel(), BLOCK),)
    kernel[grid](own, rows, out, out.numel(), rows.stride(0), RANK=rank, SIZE=len(rows), BLOCK=BLOCK)
