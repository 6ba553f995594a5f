"""Attention with its forward derivative, and the gradients of both, in plain operations: what runs on a CPU.

With S = scale q k^T + mask, P = softmax(S), tS = scale (tq k^T + q tk^T) and mu = rowsum(P tS), the outputs are o = P v
and to = P (tS - mu) v + P tv. With go and gto the gradients of o and to, delta = rowsum(go o + gto to) and
d2 = rowsum(gto o), those of the inputs follow from lse = logsumexp(S) and mu alone:

    gtS = P (gto v^T - d2)                 gS = P (go v^T + gto tv^T - delta) + gtS (tS - mu)
    dq = scale (gS k + gtS tk)             dk = scale (gS^T q + gtS^T tq)            dv = P^T go + (P (tS - mu))^T gto
    dtq = scale gtS k                      dtk = scale gtS^T q                       dtv = P^T gto

Half precision is computed in fp32. The L^2 matrices, two forward and four backward, are each used again in place.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fullstride.jvp.attention.layout import output_like, visible_band

Queries = Float[Tensor, "b h lq d"]
Keys = Float[Tensor, "b hk lk d"]
Values = Float[Tensor, "b hk lk dv"]
Outputs = Float[Tensor, "b h lq dv"]
Rows = Float[Tensor, "b h lq"]
Mask = Bool[Tensor, "b h lq lk"] | Float[Tensor, "b h lq lk"]
Gradients = tuple[Queries, Keys, Values, Queries | None, Keys | None, Values | None]


def _flat(x: Any, kv_heads: int, factor: float = 1.0) -> Any:
    """(B, H, L, D) as (B * kv_heads, rows, D): the query heads that share a key head lie in one matrix."""
    if x is None:
        return None
    full = x.to(torch.promote_types(x.dtype, torch.float32))
    b, h, length, d = x.shape
    return (full if factor == 1.0 else full * factor).reshape(b * kv_heads, h // kv_heads * length, d)


def _add(total: Tensor, a: Tensor | None, b: Tensor | None) -> Tensor:
    """total + a @ b, in place; an absent factor is zero."""
    return total if a is None or b is None else total.baddbmm_(a, b)


def _t(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.mT


def _row_dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(-1, keepdim=True)


def _hide(s: Tensor, mask: Tensor | None, band: tuple[int, int]) -> None:
    """Apply the mask and the band to the scores (B, H, Lq, Lk), in place; a broadcast mask is not expanded."""
    if mask is not None:
        for dim in range(4):
            mask = mask.narrow(dim, 0, min(1, mask.shape[dim])) if mask.stride(dim) == 0 else mask
        s = s.masked_fill_(~mask, -torch.inf) if mask.dtype == torch.bool else s.add_(mask)
    left, right = band
    offset = torch.arange(s.shape[3], device=s.device) - torch.arange(s.shape[2], device=s.device)[:, None]
    if left >= 0:
        s.masked_fill_(offset < -left, -torch.inf)
    if right >= 0:
        s.masked_fill_(offset > right, -torch.inf)


def _softmax(s: Tensor) -> Tensor:
    """logsumexp of each row, and the scores become their softmax, in place; a row without any key has zeros.

    Not exp(s - logsumexp): if a mask adds -1e9 to all of a row, its weights would be that sum's rounding error.
    """
    if s.shape[-1] == 0:
        return s.new_full((*s.shape[:-1], 1), -torch.inf)
    top = s.amax(-1, keepdim=True)
    top = top.masked_fill(top == -torch.inf, 0.0)
    total = s.sub_(top).exp_().sum(-1, keepdim=True)
    s.div_(total.masked_fill(total == 0.0, 1.0))
    return total.log_().add_(top)


def _tangent_scores(q: Tensor, k: Tensor, tq: Tensor | None, tk: Tensor | None) -> Tensor | None:
    if tq is None:
        return None if tk is None else torch.bmm(q, tk.mT)
    return _add(torch.bmm(tq, k.mT), q, _t(tk))


def _as_output(x: Tensor, q: Tensor) -> Tensor:
    o, out = x.reshape(*q.shape[:3], x.shape[-1]), output_like(q, x.shape[-1])
    return o if o.dtype == out.dtype and o.stride() == out.stride() else out.copy_(o)


def _as_gradient(x: Tensor, given: Tensor) -> Tensor:
    """Convert a gradient to the dtype and layout of its tensor."""
    out = x.reshape(given.shape)
    return out if given.is_contiguous() and out.dtype == given.dtype else torch.empty_like(given).copy_(out)


def _maybe(x: Tensor | None, given: Tensor | None) -> Tensor | None:
    return None if x is None or given is None else _as_gradient(x, given)


class _Flat(NamedTuple):
    """Tensors of the backward pass, each `_flat`, and the weights; a detached tangent leaves only the primal's."""

    go: Tensor
    gto: Tensor | None
    q: Tensor
    k: Tensor
    v: Tensor
    tq: Tensor | None
    tk: Tensor | None
    tv: Tensor | None
    o: Tensor
    to: Tensor | None
    mu: Tensor | None
    p: Tensor


def _flattened(given: Sequence[Tensor | None], scale: float, mask: Mask | None, band: tuple[int, int]) -> _Flat:
    """Flatten the tensors that `backward` takes, in its order, q and tq times the scale."""
    go, gto, q, k, v, tq, tk, tv, o, to, _, mu = given
    assert go is not None and q is not None and k is not None and v is not None and o is not None  # noqa: PT018
    heads = k.shape[1]
    q_, k_ = _flat(q, heads, scale), _flat(k, heads)
    p = torch.bmm(q_, k_.mT)
    _hide(p.view(*q.shape[:3], k.shape[2]), mask, band)
    _softmax(p)
    primal = _flat(v, heads)
    if gto is None or to is None or mu is None:
        return _Flat(_flat(go, heads), None, q_, k_, primal, None, None, None, _flat(o, heads), None, None, p)
    tangents = _flat(tq, heads, scale), _flat(tk, heads), _flat(tv, heads)
    outputs = _flat(o, heads), _flat(to, heads), mu.reshape(*p.shape[:2], 1)
    return _Flat(_flat(go, heads), _flat(gto, heads), q_, k_, primal, *tangents, *outputs, p)


def _score_gradients(x: _Flat) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """gS, gtS and tS - mu; the latter two are None if the scores have no tangent that matters."""
    delta = _row_dot(x.go, x.o)
    if x.gto is None or x.to is None or x.mu is None:
        return torch.bmm(x.go, x.v.mT).sub_(delta).mul_(x.p), None, None
    delta.add_(_row_dot(x.gto, x.to))
    gs = _add(torch.bmm(x.go, x.v.mT), x.gto, _t(x.tv)).sub_(delta).mul_(x.p)
    ts = _tangent_scores(x.q, x.k, x.tq, x.tk)
    if ts is None:
        return gs, None, None
    gts = torch.bmm(x.gto, x.v.mT).sub_(_row_dot(x.gto, x.o)).mul_(x.p)
    return gs.addcmul_(gts, ts.sub_(x.mu)), gts, ts


def forward(
    q: Queries,
    k: Keys,
    v: Values,
    tq: Queries | None,
    tk: Keys | None,
    tv: Values | None,
    *,
    scale: float,
    mask: Mask | None = None,
    causal: bool = False,
    window: tuple[int, int] | None = None,
) -> tuple[Outputs, Outputs | None, Rows, Rows | None]:
    """Attention and its derivative along the tangents; an absent tangent is zero, and its work is not done.

    Args:
        q: queries; head h of H uses key head h // (H / Hk).
        k: keys.
        v: values.
        tq: tangent of q, or None.
        tk: tangent of k, or None.
        tv: tangent of v, or None.
        scale: factor of the scores.
        mask: bool, true if a query sees a key, or numbers added to the scores (-inf hides).
        causal: key j is seen by query i if j <= i.
        window: (left, right): key j is seen by query i if i - left <= j <= i + right; negative means no limit.

    Returns:
        o, to, lse, mu: to and mu are None without any tangent. A row that sees no key has o = to = mu = 0, lse = -inf.

    """
    kv_heads, rows = k.shape[1], q.shape[:3]
    q_, tq_ = _flat(q, kv_heads, scale), _flat(tq, kv_heads, scale)
    k_, v_, tk_, tv_ = _flat(k, kv_heads), _flat(v, kv_heads), _flat(tk, kv_heads), _flat(tv, kv_heads)
    p = torch.bmm(q_, k_.mT)
    _hide(p.view(*rows, k.shape[2]), mask, visible_band(causal, window))
    lse = _softmax(p)
    o = _as_output(torch.bmm(p, v_), q)
    ts = _tangent_scores(q_, k_, tq_, tk_)
    if ts is not None:
        mu = ts.mul_(p).sum(-1, keepdim=True)
        to = _add(torch.bmm(ts.addcmul_(p, mu, value=-1), v_), p, tv_)
    elif tv_ is not None:
        mu, to = torch.zeros_like(lse), torch.bmm(p, tv_)
    else:
        return o, None, lse.view(rows), None
    return o, _as_output(to, q), lse.view(rows), mu.view(rows)


def backward(
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
    *,
    scale: float,
    mask: Mask | None = None,
    causal: bool = False,
    window: tuple[int, int] | None = None,
) -> Gradients:
    """Compute the gradients of `forward` from its inputs and outputs.

    Args:
        go: gradient of o.
        gto: gradient of to, or None if the tangent was detached.
        q: as given to `forward`, and so the other inputs.
        k: keys.
        v: values.
        tq: tangent of q, or None.
        tk: tangent of k, or None.
        tv: tangent of v, or None.
        o: as `forward` returned it, and so the other outputs.
        to: tangent of o; unused if gto is None, and so is mu.
        lse: logsumexp of the scores; not used here, as the weights are made from the scores alone.
        mu: mean of the scores' tangent.
        scale: as given to `forward`, and so the rest.
        mask: mask.
        causal: causal.
        window: window.

    Returns:
        dq, dk, dv, dtq, dtk, dtv, each in the dtype and layout of its input; those of absent tangents are None, and
        those of all tangents if gto is None.

    """
    given = go, gto, q, k, v, tq, tk, tv, o, to, lse, mu
    x = _flattened(given, scale, mask, visible_band(causal, window))
    gs, gts, ts = _score_gradients(x)
    dv, dtv = torch.bmm(x.p.mT, x.go), None if x.tv is None or x.gto is None else torch.bmm(x.p.mT, x.gto)
    dq, dk, dtq, dtk = torch.bmm(gs, x.k), torch.bmm(gs.mT, x.q), None, None
    if gts is not None and ts is not None:
        dv = _add(dv, ts.mul_(x.p).mT, x.gto)
        dq, dk = _add(dq, gts, x.tk), _add(dk, gts.mT, x.tq)
        dtq = None if x.tq is None else torch.bmm(gts, x.k).mul_(scale)
        dtk = None if x.tk is None else torch.bmm(gts.mT, x.q)
    primal = _as_gradient(dq.mul_(scale), q), _as_gradient(dk, k), _as_gradient(dv, v)
    return *primal, _maybe(dtq, tq), _maybe(dtk, tk), _maybe(dtv, tv)


def mask_gradient(
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
    *,
    scale: float,
    mask: Mask,
    causal: bool = False,
    window: tuple[int, int] | None = None,
) -> Float[Tensor, "b h lq lk"]:
    """Gradient of a mask that is added to the scores: gS, in the mask's dtype; the arguments are those of `backward`.

    It is as large as the scores.
    """
    given = go, gto, q, k, v, tq, tk, tv, o, to, lse, mu
    gs, *_ = _score_gradients(_flattened(given, scale, mask, visible_band(causal, window)))
    return _as_gradient(gs, mask)
