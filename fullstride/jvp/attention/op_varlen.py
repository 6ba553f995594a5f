"""Attention on sequences of unequal lengths, packed one after the other."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int, Int32
from torch import Tensor

from fullstride.jvp.attention import written_out
from fullstride.jvp.attention.arguments import (
    AttentionOptions,
    attention_options,
    check_heads,
    check_packed,
    check_starts,
)
from fullstride.jvp.attention.autocast import as_autocast, without_autocast
from fullstride.jvp.attention.naive_varlen import bounds
from fullstride.jvp.attention.register import VARLEN
from fullstride.jvp.dual import pack, refuse_gradient_inside_jvp, unpack_all
from fullstride.jvp.state import tangent_grad
from fullstride.jvp.subclasses import materialized_all

Starts = Int32[Tensor, " n"]
STARTS = "cu_seqlens_q", "cu_seqlens_k"


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
        implementation: `auto`, `plain` or `triton`; `plain` needs memory as large as all queries times all keys.

    Returns:
        The output, packed as q.

    Raises:
        ValueError: as `attention`.

    """
    q, k, v = as_autocast(q, k, v)
    starts = materialized_all(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    check_packed(q, k, v)
    check_heads(q, k, v, 1, enable_gqa)
    check_starts(cu_seqlens_q, len(cu_seqlens_q) - 1, "cu_seqlens_q", q.device)
    check_starts(cu_seqlens_k, len(cu_seqlens_q) - 1, "cu_seqlens_k", q.device)
    options = attention_options(q, v, scale, is_causal, window, precision, implementation)
    if implementation == "plain":
        return in_one_matrix(written_out.attention, materialized_all(q=q, k=k, v=v), starts, options)[0]
    refuse_gradient_inside_jvp()
    (q, tq), (k, tk), (v, tv) = unpack_all(q, k, v)
    q, k, v, tq, tk, tv = materialized_all(q=q, k=k, v=v, tq=tq, tk=tk, tv=tv)
    return pack(*VARLEN((q, k, v, *starts), (tq, tk, tv), (max_seqlen_q, max_seqlen_k, *options), tangent_grad()))


def in_one_matrix(
    run: Callable[..., Any], tensors: tuple[Any, ...], starts: tuple[Any, ...], options: AttentionOptions
) -> list[Any]:
    """Run attention of elementary operations on packed sequences, with a mask that keeps them apart.

    Args:
        run: a function of `written_out`.
        tensors: its packed tensors (T, H, D), or None; the first two are q and k.
        starts: bounds of the queries and of the keys.
        options: settings.

    Returns:
        Its outputs, packed.

    """
    lengths = len(tensors[0]), len(tensors[1])
    seen = _own_sequence(starts, lengths, options)
    rows: list[Any] = [None if x is None else x.transpose(0, 1)[None] for x in tensors]
    made = without_autocast(run, *rows, mask=seen, scale=options.scale)
    outs = made if isinstance(made, tuple) else (made,)
    return [None if x is None else x[0].transpose(0, 1) for x in outs]


def _own_sequence(starts: tuple[Any, ...], lengths: tuple[int, int], options: AttentionOptions) -> Tensor:
    left, right = options.left, 0 if options.causal else options.right
    (of_q, at_q), (of_k, at_k) = (_places(*given) for given in zip(starts, lengths, STARTS, strict=True))
    seen = (of_q[:, None] == of_k) & (of_k >= 0)
    offset = at_k - at_q[:, None]
    seen = seen & (offset >= -left) if left >= 0 else seen
    return seen & (offset <= right) if right >= 0 else seen


def _places(starts: Tensor, total: int, name: str) -> tuple[Tensor, Tensor]:
    """Return each row's sequence, -1 for none, and its position in it."""
    if not torch.compiler.is_compiling() and not starts.is_cuda:
        bounds(starts, total, name)
    rows = torch.arange(total, dtype=starts.dtype, device=starts.device)
    sequence = torch.searchsorted(starts, rows, right=True) - 1
    sequence = torch.where(sequence < len(starts) - 1, sequence, -1)
    return sequence, rows - starts[sequence.clamp(min=0)]


def document_starts(document_ids: Int[Tensor, "b l"]) -> tuple[Starts, int]:
    """Return the bounds of documents that lie one after the other, for `attention_varlen` on (B * L) rows.

    It reads the ids, for which a GPU is waited for: call it once a batch, outside of compiled code.

    Args:
        document_ids: of each row; those of one document lie together.

    Returns:
        cu_seqlens of both queries and keys, and the length of the longest document.

    Raises:
        ValueError: if a document's rows are apart, between which `attention_varlen` would not look.

    """
    first = torch.ones_like(document_ids, dtype=torch.bool)
    first[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    for row, starts in zip(document_ids, first, strict=True):
        if len(row[starts].unique()) != int(starts.sum()):
            raise ValueError(
                "the rows of a document lie apart, expected those of each document one after the other; sort them, or "
                "pass document_ids to attention, which takes any order"
            )
    end = first.new_tensor([document_ids.numel()], dtype=torch.int32)
    starts = torch.cat([first.flatten().nonzero()[:, 0].to(torch.int32), end])
    return starts, int(starts.diff().max()) if len(starts) > 1 else 0
