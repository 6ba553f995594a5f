"""The operators of attention on pairs, each by plain operations or by kernels."""

from typing import Any

import torch
from torch import Tensor

from fullstride.device.precision import rounds_products
from fullstride.jvp.attention import naive, naive_varlen
from fullstride.jvp.attention.layout import output_like
from fullstride.jvp.dual_op import PairOp, Tensors
from fullstride.jvp.registration import register

COMMON = (("scale", "float"), ("causal", "bool"), ("left", "int"), ("right", "int"), ("precision", "str"))
SETTINGS = (*COMMON, ("implementation", "str"))
TANGENTS = ("tq", "tk", "tv")


def _options(settings: tuple[Any, ...]) -> tuple[dict[str, Any], bool]:
    scale, causal, left, right, precision, implementation = settings
    options: dict[str, Any] = {"scale": scale, "causal": causal, "window": (left, right)}
    if implementation != "triton":
        return options, False
    return options | {"precision": precision or _torchs_precision()}, True


def _torchs_precision() -> str:
    return "tf32" if rounds_products() else "ieee"


def _forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *rest: Any) -> Tensors:
    tangents, (options, fused) = rest[:3], _options(rest[3:])
    if fused:
        from fullstride.jvp.attention.launch_forward import forward  # Triton is a GPU's

        return forward(q, k, v, *tangents, mask=mask, **options)
    return naive.forward(q, k, v, *tangents, mask=mask, **options)


def _backward(
    go: Tensor, gto: Tensor | None, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *rest: Any
) -> Tensors:
    tangents, outputs, (options, fused) = rest[:3], rest[3:7], _options(rest[7:])
    given: tuple[Any, ...] = (go, gto, q, k, v, *tangents, *outputs)
    dq, dk, dv, *of_tangents = (_fused_backward if fused else naive.backward)(*given, mask=mask, **options)
    return dq, dk, dv, None, *of_tangents


def _fused_backward(
    go: Tensor, gto: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any, mask: Tensor | None, **options: Any
) -> Tensors:
    from fullstride.jvp.attention.backward import backward  # Triton is a GPU's
    from fullstride.jvp.attention.torch_sdpa import backward_of

    if gto is None and mask is None and max(options["window"]) < 0:
        found = backward_of(go, q, k, v, rest[3], rest[5], scale=options["scale"], causal=options["causal"])
        if found is not None:
            return *found, None, None, None
    return backward(go, gto, q, k, v, *rest, mask=mask, **options)


def _mask_gradient(go: Tensor, gto: Tensor | None, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, *rest: Any) -> Tensor:
    """In plain operations for either implementation: it takes as much memory as the scores however it is computed."""
    scale, causal, left, right, *_ = rest[7:]
    return naive.mask_gradient(go, gto, q, k, v, *rest[:7], mask=mask, scale=scale, causal=causal, window=(left, right))


def _shapes(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *rest: Any) -> Tensors:
    return _with_rows(output_like(q, v.shape[-1]), q.shape[:3], rest[:3])


def _with_rows(o: Tensor, rows: tuple[int, ...], tangents: tuple[Tensor | None, ...]) -> Tensors:
    lse = o.new_empty(rows, dtype=torch.promote_types(o.dtype, torch.float32))
    if all(t is None for t in tangents):
        return o, None, lse, None
    return o, torch.empty_like(o), lse, torch.empty_like(lse)


ATTENTION = register(
    PairOp(
        name="attention",
        primals=("q", "k", "v", "mask"),
        tangents=TANGENTS,
        settings=SETTINGS,
        rows=2,
        forward=_forward,
        backward=_backward,
        shapes=_shapes,
        keeps_output=True,
        shared=(),
        seldom=("mask", _mask_gradient),
    )
)


def _forward_varlen(q: Tensor, k: Tensor, v: Tensor, starts_q: Tensor, starts_k: Tensor, *rest: Any) -> Tensors:
    tangents, (longest_q, longest_k), (options, fused) = rest[:3], rest[3:5], _options(rest[5:])
    tq, tk, tv = tangents
    if fused:
        from fullstride.jvp.attention.launch_forward import forward_varlen  # Triton is a GPU's

        return forward_varlen(q, k, v, tq, tk, tv, starts_q, starts_k, longest_q, longest_k, **options)
    return naive_varlen.forward_varlen(q, k, v, tq, tk, tv, starts_q, starts_k, **options)


def _backward_varlen(
    go: Tensor, gto: Tensor | None, q: Tensor, k: Tensor, v: Tensor, starts_q: Tensor, starts_k: Tensor, *rest: Any
) -> Tensors:
    tangents, outputs, (longest_q, longest_k), (options, fused) = rest[:3], rest[3:7], rest[7:9], _options(rest[9:])
    given: tuple[Any, ...] = (go, gto, q, k, v, *tangents, *outputs, starts_q, starts_k)
    if fused:
        from fullstride.jvp.attention.backward import backward_varlen  # Triton is a GPU's

        dq, dk, dv, *of_tangents = backward_varlen(*given, max_seqlen_q=longest_q, max_seqlen_k=longest_k, **options)
    else:
        dq, dk, dv, *of_tangents = naive_varlen.backward_varlen(*given, **options)
    return dq, dk, dv, None, None, *of_tangents


def _shapes_varlen(q: Tensor, k: Tensor, v: Tensor, starts_q: Tensor, starts_k: Tensor, *rest: Any) -> Tensors:
    total, heads, _ = q.shape
    return _with_rows(q.new_empty(total, heads, v.shape[-1]), (heads, total), rest[:3])


VARLEN = register(
    PairOp(
        name="attention_varlen",
        primals=("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"),
        tangents=TANGENTS,
        settings=(("max_seqlen_q", "int"), ("max_seqlen_k", "int"), *SETTINGS),
        rows=2,
        forward=_forward_varlen,
        backward=_backward_varlen,
        shapes=_shapes_varlen,
        keeps_output=True,
        shared=("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", *TANGENTS),
    )
)
