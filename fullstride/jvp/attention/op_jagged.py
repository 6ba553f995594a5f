"""Attention on jagged tensors (B, H, L, D), whose L differs between samples: packed sequences with their bounds."""

from typing import Any

import torch
from torch import Tensor

from fullstride.jvp.attention import written_out
from fullstride.jvp.attention.arguments import attention_options, check_heads
from fullstride.jvp.attention.autocast import as_autocast
from fullstride.jvp.attention.op_varlen import attention_varlen, in_one_matrix
from fullstride.jvp.attention.register import VARLEN
from fullstride.jvp.dual import check_pair

# With `fullgraph=True` the compiler stops here, and says so; else it compiles what is before and after.
_between_graphs = torch.compiler.disable(
    reason="attention of jagged tensors reads their lengths, which a graph cannot; expected torch.compile without "
    "fullgraph=True, or attention_varlen of their values"
)


def jagged_options(mask: Any, causal: bool | str, more: Any) -> dict[str, Any]:
    """Return the keywords of `attention_varlen`, which has fewer.

    Raises:
        ValueError: for arguments that it lacks.

    """
    named = [*(["attn_mask"] if mask is not None else []), *more]
    if named or not isinstance(causal, bool):
        raise ValueError(
            f"{' and '.join(named) or 'is_causal=' + repr(causal)} with jagged tensors, expected none of attention's "
            "arguments but is_causal=True, scale, enable_gqa, window, precision and implementation; pad the samples"
        )
    return {"is_causal": causal}


@_between_graphs
def jagged_attention(q: Any, k: Any, v: Any, given: dict[str, Any]) -> Tensor:
    """`attention_varlen` of the samples; without forward derivatives, as torch gives jagged tensors no tangent."""
    values, starts, longest = _packed(q, k, v)
    return _jagged(attention_varlen(*values, *starts, *longest, **given), q)


@_between_graphs
def jagged_attention_dual(
    primals: tuple[Any, ...], tangents: tuple[Any, ...], given: dict[str, Any], tangent_grad: bool
) -> tuple[Tensor, Tensor | None]:
    """`attention_dual` of the samples."""
    q, k, v = primals
    values, starts, longest = _packed(q, k, v)
    moved = [None if t is None else _values(t, of, "a tangent") for t, of in zip(tangents, primals, strict=True)]
    for primal, tangent in zip(values, moved, strict=True):
        check_pair(primal, tangent)
    values, moved = as_autocast(*values), as_autocast(*moved)
    check_heads(values[0], values[1], values[2], 1, given.pop("enable_gqa"))
    named = given["implementation"]
    options = attention_options(values[0], values[2], causal=given.pop("is_causal"), **given)
    if named == "plain":
        o, to = in_one_matrix(written_out.attention_dual, (*values, *moved), starts, options)
        to = to if tangent_grad or to is None else to.detach()
    else:
        o, to = VARLEN((*values, *starts), moved, (*longest, *options), tangent_grad)
    return _jagged(o, q), None if to is None else _jagged(to, q)


def _packed(q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
    """Values (T, H, D), bounds and longest lengths of the queries and keys."""
    values = [_values(q, q, "q"), _values(k, k, "k"), _values(v, k, "v")]
    starts = tuple(x.offsets().to(torch.int32) for x in (q, k))
    if len(starts[0]) != len(starts[1]):
        raise ValueError(f"q has {len(q)} samples and k {len(k)}, expected as many")
    return values, starts, [int(x._get_max_seqlen()) for x in (q, k)]


def _values(x: Any, like: Any, name: str) -> Tensor:
    """Return a jagged tensor's values, if it is (B, H, L, D) with the lengths of `like`."""
    if not x.is_nested or x.layout != torch.jagged or x.dim() != 4 or x.lengths() is not None:
        raise ValueError(f"{name} is {x.layout}, expected a jagged tensor (B, H, L, D) without holes, like q")
    by_rows = x.transpose(1, 2)
    if by_rows._ragged_idx != 1 or not (x.shape == like.shape or torch.equal(x.offsets(), like.offsets())):
        raise ValueError(f"{name} is {tuple(x.shape)}, expected (B, H, L, D) with the lengths of its own tensor")
    return by_rows.values()


def _jagged(values: Tensor, like: Any) -> Tensor:
    lengths = {"min_seqlen": like._get_min_seqlen(), "max_seqlen": like._get_max_seqlen()}
    return torch.nested.nested_tensor_from_jagged(values, like.offsets(), **lengths).transpose(1, 2)
