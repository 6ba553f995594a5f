"""Attention in elementary operations on duals, each of which has every derivative: for masks that move, dropout, and
gradients inside the function.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fullstride.jvp.attention.layout import visible_band
from fullstride.jvp.subclasses import materialized


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    scale: float,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """softmax(scale q k^T + mask) v of (..., H, L, D); k and v may have fewer heads. Memory grows with the scores.

    As in the fused op, a query that sees no key gives zeros, and what is hidden has no derivative.
    """
    full = torch.promote_types(q.dtype, torch.float32)
    group = q.shape[-3] // max(k.shape[-3], 1) if q.ndim > 2 and k.ndim > 2 and k.shape[-3] > 1 else 1
    k, v = (x.repeat_interleave(group, -3) if group > 1 else x for x in (k, v))
    scores = (q.to(full) * scale) @ k.to(full).mT
    hidden = _outside(scores, causal, window)
    if mask is not None:
        mask = materialized("attn_mask", mask)
        scores = scores if mask.dtype == torch.bool else scores + mask
        hidden = hidden | (~mask if mask.dtype == torch.bool else scores == -torch.inf)
    unseen = hidden.all(-1, keepdim=True)
    scores = scores.masked_fill(hidden, -torch.inf).masked_fill(unseen, 0.0)
    weights = _softmax(scores).masked_fill(unseen, 0.0)
    return (F.dropout(weights, dropout) @ v.to(full)).to(q.dtype)


def _softmax(scores: Tensor) -> Tensor:
    """Softmax in elementary operations: outside torch.func, torch's derivative overwrites what its gradient needs."""
    exponentials = (scores - scores.detach().amax(-1, keepdim=True)).exp()
    return exponentials / exponentials.sum(-1, keepdim=True)


def _outside(scores: Tensor, causal: bool, window: tuple[int, int] | None) -> Tensor:
    left, right = visible_band(causal, window)
    queries, keys = (torch.arange(n, device=scores.device) for n in scores.shape[-2:])
    offset = keys - queries[:, None]
    outside = torch.zeros_like(offset, dtype=torch.bool)
    if left >= 0:
        outside = outside | (offset < -left)
    return outside | (offset > right) if right >= 0 else outside
