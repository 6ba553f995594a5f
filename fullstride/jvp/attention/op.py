"""Attention on tensors, duals and pairs."""

from collections.abc import Callable
from typing import Any, Unpack

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.attention.bias import CausalBias

from fullstride.jvp.attention import written_out
from fullstride.jvp.attention.arguments import (
    AttentionOptions,
    as_causal,
    attention_options,
    check_batch,
    check_heads,
    checked_mask,
)
from fullstride.jvp.attention.autocast import as_autocast, without_autocast
from fullstride.jvp.attention.masking import FlexMask, More, Rules, Visible, what_is_seen, with_sinks
from fullstride.jvp.attention.op_jagged import jagged_attention, jagged_attention_dual, jagged_options
from fullstride.jvp.attention.register import ATTENTION
from fullstride.jvp.attention.torch_sdpa import may_lose_gradients
from fullstride.jvp.dual import check_pair, pack, refuse_gradient_inside_jvp, unpack_all
from fullstride.jvp.mixed_batch import REMEDY, Batch, MixedBatch, split_mixed
from fullstride.jvp.state import gradient_inside, tangent_grad, without_own_modes
from fullstride.jvp.subclasses import materialized_all

Queries = Float[Tensor, "b h lq d"]
Keys = Float[Tensor, "b hk lk d"]
Values = Float[Tensor, "b hk lk dv"]
Outputs = Float[Tensor, "b h lq dv"]
Mask = Bool[Tensor, "*#bhqk"] | Float[Tensor, "*#bhqk"] | FlexMask | Callable[..., Tensor]
Some = Float[MixedBatch, "b h l d"]


def attention(
    q: Queries | Some,
    k: Keys | Some,
    v: Values | Some,
    *,
    attn_mask: Mask | None = None,
    is_causal: bool | str = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    window: tuple[int, int] | None = None,
    precision: str | None = None,
    implementation: str = "auto",
    **more: Unpack[More],
) -> Outputs | Some:
    """softmax(scale q k^T + mask) v (arXiv:1706.03762, equation 1), exact and fused under `jvp`, too.

    Same signature as `torch.nn.functional.scaled_dot_product_attention`, which runs if nothing carries a tangent and
    no argument is given that it lacks, but for gradients that cuDNN would take wrongly (`torch_sdpa`). The
    Triton form's memory is linear in the lengths. A query that sees no key gives zeros.

    q, k and v may be jagged tensors (B, H, L, D) whose L differs between samples, which run as packed sequences. They
    carry no tangent of torch's: inside a derivative use `attention_varlen` on their values, or `attention_dual`.

    Args:
        q: queries, of any strides: a transposed (B, L, H, D) is not copied.
        k: keys.
        v: values.
        attn_mask: broadcasts to (B, H, Lq, Lk): bool, true if a query sees a key, or added to the scores. Hide
            by bool or by -inf: if a large negative number hides all of a row, Triton's gradients of it are inexact.
            A mask that requires a gradient needs memory as large as the scores. If the mask carries a tangent, the
            attention runs in elementary operations. A function mask_mod(b, h, q_idx, kv_idx) of FlexAttention or its
            `BlockMask` is turned into a bool mask at each call: for speed do so once (`create_mask`).
        is_causal: query i sees keys j <= i, counted from the first of each, as in SDPA; "bottom-right": from the last
            of each, as in FlashAttention, and so does the window.
        scale: factor of the scores [default: 1 / sqrt(D)].
        enable_gqa: allow fewer heads in k and v; head h of H sees head h // (H / Hk).
        window: (left, right): query i sees keys i - left <= j <= i + right; -1 means no limit.
        precision: format of fp32 products on a GPU: ieee, tf32x3 or tf32; None follows
            PyTorch's setting, made by `torch.set_float32_matmul_precision` or `torch.backends.cuda.matmul`.
        implementation: `auto`, or one by name: `triton`; or `plain`, which is made of elementary operations and has
            derivatives of any order, in memory as large as the scores.
        more: keywords of `More`:
            `document_ids` (B, L) of integers: a query sees the keys of its own document, in any order, by a bool mask
            of (B, 1, L, L); sorted documents need less as packed sequences (`document_starts`).
            `alibi_slopes` (H,) or (B, H): adds -slope |i + Lk - Lq - j| to the scores, by an fp32 mask of that size.
            `sinks` (H,): each head's score of one more key, whose value is zero. Like a mask, slopes and sinks may
            require a gradient.
            `softcap` c: turns a score s into c tanh(s / c) before masks are added; `plain` alone has it.
            `dropout_p`: probability that a weight is dropped, the same ones for output and tangent; `plain` alone has
            it. Drawn from torch's generator, or from `dropout_seed`, an integer or a tensor of one: the same for each
            device, compiled or not.

    Returns:
        The output, in q's memory order.

    Raises:
        ValueError: for tensors that do not fit each other, unknown settings, or what the implementation lacks.
        RuntimeError: under a jvp of a jvp or of a gradient, unless the implementation is `plain`.

    """
    if isinstance(q, Tensor) and q.is_nested:
        given = jagged_options(attn_mask, is_causal, more) | {"scale": scale, "enable_gqa": enable_gqa}
        given |= {"window": window, "precision": precision, "implementation": implementation}
        return jagged_attention(q, k, v, given)
    if isinstance(attn_mask, CausalBias):
        attn_mask, triangle = as_causal(attn_mask, q, k, bool(is_causal))
        is_causal = is_causal or triangle
    rules, visible = Rules(**more), Visible(attn_mask, is_causal, window)
    of_all = [x.primal if isinstance(x, MixedBatch) else x for x in (q, k, v)]
    seen, changed = what_is_seen(of_all, visible, rules, implementation)
    if any(isinstance(x, MixedBatch) for x in (q, k, v)):
        given = {"scale": scale, "enable_gqa": enable_gqa, "precision": precision, "implementation": implementation}
        return _of_some((q, k, v), seen, given, rules)
    q, k, v = as_autocast(q, k, v)
    (k, v), seen = with_sinks(rules.sinks, [k, v], seen, q)
    if implementation == "plain":
        options = _checked(q, k, v, seen, scale, enable_gqa, precision, implementation)
        return _written_out(written_out.attention, (q, k, v), seen.mask, options, rules)
    with without_own_modes():  # which would see each look at a size
        of_kernels = {"scale": scale, "enable_gqa": enable_gqa, "precision": precision}
        found, options = _fused((q, k, v), seen, of_kernels, implementation, changed)
    if found is not None:
        return found
    assert options is not None
    return _written_out(written_out.attention, (q, k, v), seen.mask, options, rules)


def _fused(
    duals: tuple[Tensor, ...], seen: Visible, given: dict[str, Any], implementation: str, changed: bool
) -> tuple[Tensor | None, AttentionOptions | None]:
    """Return the attention by the op, or by SDPA if nothing moves; else the options for elementary operations."""
    refuse_gradient_inside_jvp()
    (q, tq), (k, tk), (v, tv), (mask, tmask) = unpack_all(*duals, seen.mask)
    still = tq is None and tk is None and tv is None and tmask is None and not gradient_inside()
    library = still and not changed and seen.window is None and given["precision"] is None and implementation == "auto"
    if library and not may_lose_gradients(q, k, v, mask):
        options = {"scale": given["scale"], "enable_gqa": given["enable_gqa"]}
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=bool(seen.causal), **options), None
    q, k, v, mask = materialized_all(q=q, k=k, v=v, attn_mask=mask)
    tangents = materialized_all(tq=tq, tk=tk, tv=tv)
    options = _checked(q, k, v, seen._replace(mask=mask), implementation=implementation, **given)
    if tmask is not None or gradient_inside():
        _refuse_named(implementation, tmask)
        return None, options
    mask = None if mask is None else mask.expand(*q.shape[:3], k.shape[2])
    return pack(*ATTENTION((q, k, v, mask), tangents, options, tangent_grad())), None


def attention_dual(
    q: Queries,
    k: Keys,
    v: Values,
    tq: Queries | None = None,
    tk: Keys | None = None,
    tv: Values | None = None,
    *,
    attn_mask: Mask | None = None,
    is_causal: bool | str = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    window: tuple[int, int] | None = None,
    precision: str | None = None,
    implementation: str = "auto",
    tangent_grad: bool = True,
    **more: Unpack[More],
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
        more: keywords of `More`, as in `attention`.

    Returns:
        The output and its tangent; the latter is None if no tangent is given.

    Raises:
        ValueError: as `attention`, and for a tangent of another shape, dtype or device than its primal.

    """
    if q.is_nested:
        given = jagged_options(attn_mask, is_causal, more) | {"scale": scale, "enable_gqa": enable_gqa}
        given |= {"window": window, "precision": precision, "implementation": implementation}
        return jagged_attention_dual((q, k, v), (tq, tk, tv), given, tangent_grad)
    if isinstance(attn_mask, CausalBias):
        attn_mask, triangle = as_causal(attn_mask, q, k, bool(is_causal))
        is_causal = is_causal or triangle
    q, k, v = materialized_all(q=q, k=k, v=v)
    tq, tk, tv = materialized_all(tq=tq, tk=tk, tv=tv)
    check_batch(q, k, v)
    check_heads(q, k, v, 1, enable_gqa)
    for primal, tangent in zip((q, k, v), (tq, tk, tv), strict=True):
        check_pair(primal, tangent)
    rules, visible = Rules(**more), Visible(attn_mask, is_causal, window)
    seen, _ = what_is_seen([q, k, v], visible, rules, implementation)
    (q, k, v), (tq, tk, tv) = as_autocast(q, k, v), as_autocast(tq, tk, tv)
    (k, v, tk, tv), seen = with_sinks(rules.sinks, [k, v, tk, tv], seen, q)
    (mask,) = materialized_all(attn_mask=seen.mask)
    options = _checked(q, k, v, seen._replace(mask=mask), scale, enable_gqa, precision, implementation)
    if implementation == "plain":
        o, to = _written_out(written_out.attention_dual, (q, k, v, tq, tk, tv), mask, options, rules)
        return o, to if tangent_grad or to is None else to.detach()
    mask = None if mask is None else mask.expand(*q.shape[:3], k.shape[2])
    return ATTENTION((q, k, v, mask), (tq, tk, tv), options, tangent_grad)


def _checked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Visible,
    scale: float | None,
    enable_gqa: bool,
    precision: str | None,
    implementation: str,
) -> AttentionOptions:
    """Return the settings, if the tensors fit each other and them."""
    check_batch(q, k, v)
    check_heads(q, k, v, 1, enable_gqa)
    checked_mask(seen.mask, q, k, seen.causal)
    return attention_options(q, v, scale, seen.causal, seen.window, precision, implementation)


def _written_out(
    run: Callable[..., Any], tensors: tuple[Any, ...], mask: Tensor | None, options: AttentionOptions, rules: Rules
) -> Any:
    """Compute in elementary operations, which choose their own precision."""
    window = options.left, options.right
    given: dict[str, Any] = {"scale": options.scale, "causal": options.causal, "window": window}
    given |= {"softcap": rules.softcap, "dropout": rules.dropout_p, "seed": rules.dropout_seed}
    return without_autocast(run, *tensors, mask, **given)


def _refuse_named(implementation: str, tmask: Tensor | None) -> None:
    if implementation == "triton":
        what = "a mask that carries a tangent" if tmask is not None else "a gradient inside the derivative"
        raise ValueError(f"{what} with implementation='triton', whose kernels have none; pass 'plain' or 'auto'")


def _of_some(given: tuple[Batch, ...], seen: Visible, options: dict[str, Any], rules: Rules) -> MixedBatch:
    """Compute attention of all primals at once, then again of the pairs, for the tangent alone."""
    if rules.dropout_p > 0 and rules.dropout_seed is None:
        raise ValueError(f"dropout_p would drop other weights of the tangent; pass dropout_seed, or {REMEDY}")
    primals, heads, tangents = split_mixed(given)
    mask, causal, window = seen
    options |= {"is_causal": causal, "window": window, "sinks": rules.sinks, "softcap": rules.softcap}
    options |= {"dropout_p": rules.dropout_p, "dropout_seed": rules.dropout_seed}
    out = attention(*primals, attn_mask=mask, **options)
    own = mask[: len(heads[0])] if mask is not None and mask.ndim == 4 and len(mask) > 1 else mask
    with torch.no_grad():
        _, tangent = attention_dual(*heads, *tangents, attn_mask=own, **options, tangent_grad=False)
    assert tangent is not None
    return MixedBatch(out, tangent)
