"""Kernel of `mean_of`, in a module of its own since CPU builds of PyTorch have no Triton."""

from typing import no_type_check

import triton
import triton.language as tl

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
