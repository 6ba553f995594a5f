"""Attention in plain operations on duals, for a mask that moves: it has every derivative that PyTorch has."""

import torch
from torch import Tensor

from fullstride.jvp.attention.layout import visible_band


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, *, scale: float, window: tuple[int, int] | None = None
) -> Tensor:
    """softmax(scale q k^T + mask) v; k and v may have fewer heads, and memory grows with the scores.

    As in the fused op, a query that sees no key gives zeros, and what is hidden has no derivative.
    """
    full = torch.promote_types(q.dtype, torch.float32)
    group = q.shape[1] // max(k.shape[1], 1)
    k, v = (x.repeat_interleave(group, 1) if group > 1 else x for x in (k, v))
    scores = (q.to(full) * scale) @ k.to(full).mT + mask
    hidden = (scores == -torch.inf) | _outside(scores, window)
    unseen = hidden.all(-1, keepdim=True)
    scores = scores.masked_fill(hidden, -torch.inf).masked_fill(unseen, 0.0)
    weights = scores.softmax(-1).masked_fill(unseen, 0.0)
    return (weights @ v.to(full)).to(q.dtype)


def _outside(scores: Tensor, window: tuple[int, int] | None) -> Tensor:
    left, right = visible_band(False, window)
    queries, keys = (torch.arange(n, device=scores.device) for n in scores.shape[-2:])
    offset = keys - queries[:, None]
    outside = torch.zeros_like(offset, dtype=torch.bool)
    if left >= 0:
        outside = outside | (offset < -left)
    return outside | (offset > right) if right >= 0 else outside
