"""Attention on tensors, duals and pairs."""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int32
from torch import Tensor
from torch.nn.attention.bias import CausalBias

from fullstride.jvp.attention import written_out
from fullstride.jvp.attention.arguments import (
    as_causal,
    attention_options,
    check_batch,
    check_heads,
    check_packed,
    check_starts,
    checked_mask,
)
from fullstride.jvp.attention.register import ATTENTION, VARLEN
from fullstride.jvp.attention.torch_sdpa import may_lose_gradients
from fullstride.jvp.dual import check_pair, pack, refuse_gradient_inside_jvp, unpack_all
from fullstride.jvp.mixed_batch import Batch, MixedBatch, split_mixed
from fullstride.jvp.state import gradient_inside, tangent_grad
from fullstride.jvp.subclasses import materialized_all

Queries = Float[Tensor, "b h lq d"]
Keys = Float[Tensor, "b hk lk d"]
Values = Float[Tensor, "b hk lk dv"]
Outputs = Float[Tensor, "b h lq dv"]
Mask = Bool[Tensor, "*#bhqk"] | Float[Tensor, "*#bhqk"]
Some = Float[MixedBatch, "b h l d"]
Starts = Int32[Tensor, " n"]


def attention(
    q: Queries | Some,
    k: Keys | Some,
    v: Values | Some,
    *,
    attn_mask: Mask | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    window: tuple[int, int] | None = None,
    precision: str | None = None,
    implementation: str = "auto",
) -> Outputs | Some:
    """softmax(scale q k^T + mask) v (arXiv:1706.03762, equation 1), exact and fused under `jvp`, too.

    Same signature as `torch.nn.functional.scaled_dot_product_attention`, which runs if nothing carries a tangent and
    neither a window nor a precision is given, but for gradients that cuDNN would take wrongly (`torch_sdpa`). The
    Triton form's memory is linear in the lengths. A query that sees no key gives zeros.

    Args:
        q: queries, of any strides: a transposed (B, L, H, D) is not copied.
        k: keys.
        v: values.
        attn_mask: broadcasts to (B, H, Lq, Lk): bool, true if a query sees a key, or added to the scores. Hide
            by bool or by -inf: if a large negative number hides all of a row, Triton's gradients of it are inexact.
            A mask that requires a gradient needs memory as large as the scores. If the mask carries a tangent, the
            attention runs in elementary operations.
        is_causal: query i sees keys j <= i, counted from the first of each, as in SDPA.
        scale: factor of the scores [default: 1 / sqrt(D)].
        enable_gqa: allow fewer heads in k and v; head h of H sees head h // (H / Hk).
        window: (left, right): query i sees keys i - left <= j <= i + right; -1 means no limit.
        precision: format of fp32 products on a GPU: ieee, tf32x3 or tf32; None follows
            PyTorch's setting, made by `torch.set_float32_matmul_precision` or `torch.backends.cuda.matmul`.
        implementation: `auto`, or one by name: `plain` or `triton`.

    Returns:
        The output, in q's memory order.

    Raises:
        ValueError: for tensors that do not fit each other, or unknown settings.
        RuntimeError: under a jvp of a jvp or of a gradient.

    """
    if isinstance(attn_mask, CausalBias):
        attn_mask, is_causal = as_causal(attn_mask, q, k, is_causal)
    if any(isinstance(x, MixedBatch) for x in (q, k, v)):
        given: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa, "window": window}
        given |= {"precision": precision, "implementation": implementation}
        return _of_some((q, k, v), attn_mask, given)
    refuse_gradient_inside_jvp()
    q, k, v = _autocast(q, k, v)
    duals = q, k, v, attn_mask
    (q, tq), (k, tk), (v, tv), (mask, tmask) = unpack_all(q, k, v, attn_mask)
    still = tq is None and tk is None and tv is None and tmask is None
    plain = still and window is None and precision is None and implementation == "auto" and not gradient_inside()
    if plain and not may_lose_gradients(q, k, v, attn_mask):
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )
    q, k, v, mask = materialized_all(q=q, k=k, v=v, attn_mask=mask)
    tangents = materialized_all(tq=tq, tk=tk, tv=tv)
    check_batch(q, k, v)
    check_heads(q, k, v, 1, enable_gqa)
    mask = checked_mask(mask, q, k, is_causal)
    options = attention_options(q, v, scale, is_causal, window, precision, implementation)
    if tmask is not None or gradient_inside():
        return written_out.attention(*duals, scale=options.scale, causal=is_causal, window=window)
    return pack(*ATTENTION((q, k, v, mask), tangents, options, tangent_grad()))


def attention_dual(
    q: Queries,
    k: Keys,
    v: Values,
    tq: Queries | None = None,
    tk: Keys | None = None,
    tv: Values | None = None,
    *,
    attn_mask: Mask | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    window: tuple[int, int] | None = None,
    precision: str | None = None,
    implementation: str = "auto",
    tangent_grad: bool = True,
) -> tuple[Outputs, Outputs | None]:
    """`attention` of explicit pairs, for code that carries its tangents itself.

    Args:
        q: queries.
        k: keys.
        v: values.
        tq: tangent of q; None means zero, and its work is skipped: with q's alone, 4 of 6 products remain.
        tk: tangent of k.
        tv: tangent of v.
        attn_mask: mask, as in `attention`; so are the other arguments.
        is_causal: query i sees keys j <= i.
        scale: of the scores.
        enable_gqa: allow fewer heads in k and v.
        window: (left, right).
        precision: of the products of fp32 tensors.
        implementation: `auto`, `plain` or `triton`.
        tangent_grad: whether gradients may be taken through the output's tangent; if not, nothing of it is saved.

    Returns:
        The output and its tangent; the latter is None if no tangent is given.

    Raises:
        ValueError: as `attention`, and for a tangent of another shape, dtype or device than its primal.

    """
    q, k, v, attn_mask = materialized_all(q=q, k=k, v=v, attn_mask=attn_mask)
    tq, tk, tv = materialized_all(tq=tq, tk=tk, tv=tv)
    check_batch(q, k, v)
    check_heads(q, k, v, 1, enable_gqa)
    for primal, tangent in zip((q, k, v), (tq, tk, tv), strict=True):
        check_pair(primal, tangent)
    mask = checked_mask(attn_mask, q, k, is_causal)
    (q, k, v), tangents = _autocast(q, k, v), _autocast(tq, tk, tv)
    options = attention_options(q, v, scale, is_causal, window, precision, implementation)
    return ATTENTION((q, k, v, mask), tangents, options, tangent_grad)


def attention_varlen(
    q: Float[Tensor, "tq h d"],
    k: Float[Tensor, "tk hk d"],
    v: Float[Tensor, "tk hk dv"],
    cu_seqlens_q: Starts,
    cu_seqlens_k: Starts,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    window: tuple[int, int] | None = None,
    precision: str | None = None,
    implementation: str = "auto",
) -> Float[Tensor, "tq h dv"]:
    """`attention` within sequences packed one after the other, without padding.

    Args:
        q: queries of all sequences.
        k: keys.
        v: values.
        cu_seqlens_q: bounds of the queries, one more than sequences: sequence i has cu_seqlens_q[i] to [i + 1].
        cu_seqlens_k: bounds of the keys. A sequence may be empty. Bounds that decrease or exceed the end are
            refused on a CPU; a GPU's are not read here, and give undefined results.
        max_seqlen_q: number of queries of the longest sequence; more is harmless, less leaves rows undefined.
        max_seqlen_k: number of keys of the longest sequence.
        is_causal: as in `attention`, counted from each sequence's start; so are the other arguments.
        scale: of the scores.
        enable_gqa: allow fewer heads in k and v.
        window: (left, right).
        precision: of the products of fp32 tensors.
        implementation: `auto`, `plain` or `triton`.

    Returns:
        The output, packed as q.

    Raises:
        ValueError: as `attention`.

    """
    refuse_gradient_inside_jvp()
    q, k, v = _autocast(q, k, v)
    (q, tq), (k, tk), (v, tv) = unpack_all(q, k, v)
    q, k, v, tq, tk, tv = materialized_all(q=q, k=k, v=v, tq=tq, tk=tk, tv=tv)
    starts = materialized_all(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    check_packed(q, k, v)
    check_heads(q, k, v, 1, enable_gqa)
    check_starts(cu_seqlens_q, len(cu_seqlens_q) - 1, "cu_seqlens_q", q.device)
    check_starts(cu_seqlens_k, len(cu_seqlens_q) - 1, "cu_seqlens_k", q.device)
    options = attention_options(q, v, scale, is_causal, window, precision, implementation)
    return pack(*VARLEN((q, k, v, *starts), (tq, tk, tv), (max_seqlen_q, max_seqlen_k, *options), tangent_grad()))


def _of_some(given: tuple[Batch, ...], mask: Tensor | None, options: dict[str, Any]) -> MixedBatch:
    """Compute attention of all primals at once, then again of the pairs, for the tangent alone."""
    primals, heads, tangents = split_mixed(given)
    out = attention(*primals, attn_mask=mask, **options)
    own = mask[: len(heads[0])] if mask is not None and mask.ndim == 4 and len(mask) > 1 else mask
    with torch.no_grad():
        _, tangent = attention_dual(*heads, *tangents, attn_mask=own, **options, tangent_grad=False)
    assert tangent is not None
    return MixedBatch(out, tangent)


def _autocast(*tensors: Any) -> tuple[Any, ...]:
    """Cast the tensors as autocast does for SDPA; an absent tensor stays absent."""
    there = [x for x in tensors if x is not None]
    if not there or there[0].dtype == torch.float64 or not torch.is_autocast_enabled(there[0].device.type):
        return tensors
    dtype = torch.get_autocast_dtype(there[0].device.type)
    return tuple(None if x is None else x.to(dtype) for x in tensors)
