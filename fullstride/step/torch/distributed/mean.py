"""The mean of parts that lie in several places, in one pass."""

from typing import Any

from torch import Tensor


def mean_of(own: Tensor, rows: Tensor, rank: int, out: Tensor) -> None:
    """Fill `out` with the mean of some rows, of which one stands elsewhere.

    Args:
        own: (m,), in place of row `rank`, which is not read; may be `out`.
        rows: (n, m), whose columns lie one after the other.
        rank: which row `own` is.
        out: (m,), of the same dtype.

    """
    from fullstride.step.torch.distributed.mean_kernel import BLOCK, mean_kernel  # Triton is a GPU's

    kernel: Any = mean_kernel
    grid = (-(-out.numel() // BLOCK),)
    kernel[grid](own, rows, out, out.numel(), rows.stride(0), RANK=rank, SIZE=len(rows), BLOCK=BLOCK)
