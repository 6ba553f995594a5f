"""Attention in elementary operations, each of which has every derivative, of any order: `implementation="plain"`.

It also serves masks that move, dropout in other people's functions, and gradients inside the function.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fullstride.jvp.attention.dropout import seeded_factors
from fullstride.jvp.attention.layout import output_order, visible_band
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
    softcap: float | None = None,
    dropout: float = 0.0,
    seed: int | Tensor | None = None,
) -> Tensor:
    """softmax(scale q k^T + mask) v of (..., H, L, D); k and v may have fewer heads. Memory grows with the scores.

    As in the fused op, a query that sees no key gives zeros, and what is hidden has no derivative. A softcap c turns a
    score s into c tanh(s / c) before the mask is added. Without a seed, dropout draws from torch's own generator.
    """
    q_, k_, v_ = _full(q, k, v)
    weights = _weights(_capped(scale * q_ @ k_.mT, softcap), mask, causal, window)
    factors = _factors(weights, dropout, seed)
    return output_order((weights if factors is None else weights * factors) @ v_, q)


def attention_dual(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tq: Tensor | None,
    tk: Tensor | None,
    tv: Tensor | None,
    mask: Tensor | None = None,
    *,
    scale: float,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    seed: int | Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`attention` and its derivative along the tangents, an absent one of which is zero; None if all are."""
    q_, k_, v_ = _full(q, k, v)
    tq_, tk_, tv_ = _full(tq, tk, tv, heads=q.shape[-3])
    scores = _capped(scale * q_ @ k_.mT, softcap)
    weights = _weights(scores, mask, causal, window)
    factors = _factors(weights, dropout, seed)
    dropped = weights if factors is None else weights * factors
    to = None if tv_ is None else dropped @ tv_
    if tq_ is not None or tk_ is not None:
        moved = scale * _sum(None if tq_ is None else tq_ @ k_.mT, None if tk_ is None else q_ @ tk_.mT)
        moved = moved if softcap is None else moved * (1 - (scores / softcap).square())
        to = _sum(to, (dropped * (moved - (weights * moved).sum(-1, keepdim=True))) @ v_)
    return output_order(dropped @ v_, q), None if to is None else output_order(to, q)


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor:
    """The sum of two, one of which may be absent."""
    if a is None or b is None:
        found = b if a is None else a
        assert found is not None
        return found
    return a + b


def _full(*tensors: Any, heads: int | None = None) -> list[Any]:
    """The tensors in fp32 or better, with as many heads as the first has, or as named."""
    full = []
    for x in tensors:
        if x is not None:
            heads = heads or (x.shape[-3] if x.ndim > 2 else 1)
            group = heads // x.shape[-3] if x.ndim > 2 and x.shape[-3] > 1 else 1
            x = x.to(torch.promote_types(x.dtype, torch.float32))
            x = x.repeat_interleave(group, -3) if group > 1 else x
        full.append(x)
    return full


def _capped(scores: Tensor, softcap: float | None) -> Tensor:
    return scores if softcap is None else softcap * (scores / softcap).tanh()


def _weights(scores: Tensor, mask: Tensor | None, causal: bool, window: tuple[int, int] | None) -> Tensor:
    hidden = _outside(scores, causal, window)
    if mask is not None:
        mask = materialized("attn_mask", mask)
        scores = scores if mask.dtype == torch.bool else scores + mask.to(scores.dtype)
        hidden = hidden | (~mask if mask.dtype == torch.bool else scores == -torch.inf)
    unseen = hidden.all(-1, keepdim=True)
    scores = scores.masked_fill(hidden, -torch.inf).masked_fill(unseen, 0.0)
    return _softmax(scores).masked_fill(unseen, 0.0)


def _softmax(scores: Tensor) -> Tensor:
    """Softmax in elementary operations: outside torch.func, torch's derivative overwrites what its gradient needs."""
    if scores.shape[-1] == 0:
        return scores
    exponentials = (scores - scores.detach().amax(-1, keepdim=True)).exp()
    return exponentials / exponentials.sum(-1, keepdim=True)


def _factors(weights: Tensor, dropout: float, seed: int | Tensor | None) -> Tensor | None:
    """Zeros with the probability of dropout, else what keeps the mean: one draw for an output and its tangent."""
    if dropout == 0.0:
        return None
    return F.dropout(torch.ones_like(weights), dropout) if seed is None else seeded_factors(weights, dropout, seed)


def _outside(scores: Tensor, causal: bool, window: tuple[int, int] | None) -> Tensor:
    left, right = visible_band(causal, window)
    queries, keys = (torch.arange(n, device=scores.device) for n in scores.shape[-2:])
    offset = keys - queries[:, None]
    outside = torch.zeros_like(offset, dtype=torch.bool)
    if left >= 0:
        outside = outside | (offset < -left)
    return outside | (offset > right) if right >= 0 else outside
