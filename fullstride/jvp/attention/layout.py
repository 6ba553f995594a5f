"""Memory layout of outputs, and the window that a row sees."""

import torch
from jaxtyping import Float
from torch import Tensor


def output_like(q: Float[Tensor, "b h l d"], width: int) -> Float[Tensor, "b h l {width}"]:
    """An empty attention output, laid out as SDPA does: in q's order if q is a transposed (B, L, H, D)."""
    b, h, length, _ = q.shape
    if h > 1 and length > 1 and q.stride(1) < q.stride(2):
        strides = length * h * width, width, h * width, 1
        return torch.empty_strided((b, h, length, width), strides, dtype=q.dtype, device=q.device)
    return torch.empty(b, h, length, width, dtype=q.dtype, device=q.device)


def visible_band(causal: bool, window: tuple[int, int] | None) -> tuple[int, int]:
    """Return the window of query i, i - left <= j <= i + right; negative means no limit."""
    left, right = window or (-1, -1)
    return left, 0 if causal else right


def output_order(x: Tensor, q: Tensor) -> Tensor:
    """Return x in q's format, and in the memory order of `output_like`."""
    x = x.to(q.dtype)
    if q.ndim == 4 and q.shape[1] > 1 and q.shape[2] > 1 and q.stride(1) < q.stride(2):
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    return x
