"""`naive` for sequences of unequal lengths packed into one tensor, one after the other."""

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fullstride.jvp.attention import naive

Queries = Float[Tensor, "nq h d"]
Keys = Float[Tensor, "nk hk d"]
Values = Float[Tensor, "nk hk dv"]
Outputs = Float[Tensor, "nq h dv"]
Rows = Float[Tensor, "h nq"]
Starts = Int[Tensor, " n_plus_1"]
Gradients = tuple[Queries, Keys, Values, Queries | None, Keys | None, Values | None]


def bounds(starts: Tensor, total: int, name: str) -> list[int]:
    """Return the bounds of the sequences.

    Raises:
        ValueError: if they decrease or exceed the packed rows.

    """
    found: list[int] = starts.tolist()
    if found != sorted(found) or (found and not 0 <= found[0] <= found[-1] <= total):
        raise ValueError(f"{name} is {found}, expected non-decreasing bounds from 0 to the {total} packed rows")
    return found


def _spans(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, queries: int, keys: int) -> Iterator[tuple[slice, slice]]:
    starts_q, starts_k = bounds(cu_seqlens_q, queries, "cu_seqlens_q"), bounds(cu_seqlens_k, keys, "cu_seqlens_k")
    for i in range(len(starts_q) - 1):
        yield slice(starts_q[i], starts_q[i + 1]), slice(starts_k[i], starts_k[i + 1])


def _part(x: Tensor | None, span: slice) -> Any:
    """One sequence of a packed (T, H, D) as (1, H, L, D)."""
    return None if x is None else x[span].transpose(0, 1)[None]


def forward_varlen(
    q: Queries,
    k: Keys,
    v: Values,
    tq: Queries | None,
    tk: Keys | None,
    tv: Values | None,
    cu_seqlens_q: Starts,
    cu_seqlens_k: Starts,
    *,
    scale: float,
    causal: bool = False,
    window: tuple[int, int] | None = None,
) -> tuple[Outputs, Outputs | None, Rows, Rows | None]:
    """`naive.forward` of each sequence: tensors are packed one after the other, (T, H, D).

    Sequence i has the rows from cu_seqlens[i] to cu_seqlens[i + 1]; causal and window count from each one's start.
    """
    full = torch.promote_types(q.dtype, torch.float32)
    o, to = (q.new_zeros(*q.shape[:2], v.shape[2]) for _ in range(2))
    lse, mu = (q.new_full((q.shape[1], q.shape[0]), fill, dtype=full) for fill in (-torch.inf, 0.0))
    any_tangent = not (tq is None and tk is None and tv is None)
    for at, keys in _spans(cu_seqlens_q, cu_seqlens_k, len(q), len(k)):
        parts = _part(q, at), _part(k, keys), _part(v, keys), _part(tq, at), _part(tk, keys), _part(tv, keys)
        one = naive.forward(*parts, scale=scale, causal=causal, window=window)
        for whole, x in ((o, one[0]), (to, one[1])):
            if x is not None:
                whole[at] = x[0].transpose(0, 1)
        for whole, x in ((lse, one[2]), (mu, one[3])):
            if x is not None:
                whole[:, at] = x[0]
    return (o, to, lse, mu) if any_tangent else (o, None, lse, None)


def backward_varlen(
    go: Outputs,
    gto: Outputs | None,
    q: Queries,
    k: Keys,
    v: Values,
    tq: Queries | None,
    tk: Keys | None,
    tv: Values | None,
    o: Outputs,
    to: Outputs | None,
    lse: Rows,
    mu: Rows | None,
    cu_seqlens_q: Starts,
    cu_seqlens_k: Starts,
    *,
    scale: float,
    causal: bool = False,
    window: tuple[int, int] | None = None,
) -> Gradients:
    """`naive.backward` of each sequence, packed as in `forward_varlen`."""
    primal = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    dtq, dtk, dtv = (None if x is None or gto is None else torch.zeros_like(x) for x in (tq, tk, tv))
    for at, keys in _spans(cu_seqlens_q, cu_seqlens_k, len(q), len(k)):
        spans = at, keys, keys, at, keys, keys
        saved = _part(o, at), _part(to, at), lse[None, :, at], None if mu is None else mu[None, :, at]
        parts = _part(q, at), _part(k, keys), _part(v, keys), _part(tq, at), _part(tk, keys), _part(tv, keys)
        pair = _part(go, at), _part(gto, at)
        one = naive.backward(*pair, *parts, *saved, scale=scale, causal=causal, window=window)
        for whole, x, span in zip((*primal, dtq, dtk, dtv), one, spans, strict=True):
            if whole is not None and x is not None:
                whole[span] = x[0].transpose(0, 1)
    return *primal, dtq, dtk, dtv
