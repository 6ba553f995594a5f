"""Operators of attention on primals and tangents, each in PyTorch operations or as kernels."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fullstride.device.precision import rounds_products
from fullstride.jvp.attention import naive, naive_varlen
from fullstride.jvp.attention.arguments import AttentionOptions
from fullstride.jvp.attention.layout import output_like
from fullstride.jvp.dual_op import DualOp, Tensors
from fullstride.jvp.registration import register

COMMON = (("scale", "float"), ("causal", "bool"), ("left", "int"), ("right", "int"), ("precision", "str"))
SETTINGS = (*COMMON, ("implementation", "str"))
TANGENTS = ("tq", "tk", "tv")


class SavedForBackward(NamedTuple):
    """Results of the forward pass that backward needs; `to` and `mu` are absent without a tangent."""

    o: Tensor
    to: Tensor | None
    lse: Tensor
    mu: Tensor | None


def _options(given: Sequence[Any]) -> tuple[dict[str, Any], bool]:
    """Return an implementation's keyword arguments, and whether it is the one by kernels."""
    settings = AttentionOptions(*given)
    options: dict[str, Any] = {"scale": settings.scale, "causal": settings.causal}
    options["window"] = settings.left, settings.right
    if settings.implementation != "triton":
        return options, False
    return options | {"precision": settings.precision or ("tf32" if rounds_products() else "ieee")}, True


def _forward(primals: Any, tangents: Any, settings: Sequence[Any]) -> Tensors:
    *qkv, mask = primals
    given: tuple[Any, ...] = (*qkv, *tangents)
    options, fused = _options(settings)
    if fused:
        from fullstride.jvp.attention.launch_forward import forward  # only GPUs have Triton

        return forward(*given, mask=mask, **options)
    return naive.forward(*given, mask=mask, **options)


def _backward(go: Tensor, gto: Any, primals: Any, tangents: Any, saved: Any, settings: Sequence[Any]) -> Tensors:
    *qkv, mask = primals
    options, fused = _options(settings)
    if fused and gto is None and mask is None and max(options["window"]) < 0:
        from fullstride.jvp.attention.torch_sdpa import backward_of  # only GPUs have Triton

        given: tuple[Any, ...] = (go, *qkv, SavedForBackward(*saved).o, SavedForBackward(*saved).lse)
        found = backward_of(*given, scale=options["scale"], causal=options["causal"])
        if found is not None:
            return *found, None, None, None, None
    run: Any = naive.backward
    if fused:
        from fullstride.jvp.attention.backward import backward as run
    dq, dk, dv, *of_tangents = run(go, gto, *qkv, *tangents, *saved, mask=mask, **options)
    return dq, dk, dv, None, *of_tangents


def _mask_gradient(go: Tensor, gto: Any, primals: Any, tangents: Any, saved: Any, settings: Sequence[Any]) -> Tensor:
    """Compute it in PyTorch operations for either implementation: its memory is that of the scores in any case."""
    *qkv, mask = primals
    options, _ = _options((*settings[:-1], "plain"))
    given: tuple[Any, ...] = (go, gto, *qkv, *tangents, *saved)
    return naive.mask_gradient(*given, mask=mask, **options)


def _shapes(primals: Any, tangents: Any, settings: Sequence[Any]) -> Tensors:
    q, _, v, _ = primals
    return _with_rows(output_like(q, v.shape[-1]), q.shape[:3], tangents)


def _with_rows(o: Tensor, rows: tuple[int, ...], tangents: Tensors) -> Tensors:
    lse = o.new_empty(rows, dtype=torch.promote_types(o.dtype, torch.float32))
    if all(t is None for t in tangents):
        return SavedForBackward(o, None, lse, None)
    return SavedForBackward(o, torch.empty_like(o), lse, torch.empty_like(lse))


def _state() -> tuple[bool, ...]:
    """Return the settings of PyTorch by which products are rounded, and a backward pass is chosen."""
    flags = torch.backends.cuda
    kernels = flags.cudnn_sdp_enabled(), flags.flash_sdp_enabled(), torch.are_deterministic_algorithms_enabled()
    return rounds_products(), *kernels


ATTENTION = register(
    DualOp(
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
        state=_state,
    )
)


def _forward_varlen(primals: Any, tangents: Any, settings: Sequence[Any]) -> Tensors:
    *qkv, starts_q, starts_k = primals
    longest_q, longest_k, *common = settings
    given: tuple[Any, ...] = (*qkv, *tangents, starts_q, starts_k)
    options, fused = _options(common)
    if fused:
        from fullstride.jvp.attention.launch_forward import forward_varlen  # only GPUs have Triton

        return forward_varlen(*given, max_seqlen_q=longest_q, max_seqlen_k=longest_k, **options)
    return naive_varlen.forward_varlen(*given, **options)


def _backward_varlen(go: Tensor, gto: Any, primals: Any, tangents: Any, saved: Any, settings: Sequence[Any]) -> Tensors:
    *qkv, starts_q, starts_k = primals
    longest_q, longest_k, *common = settings
    options, fused = _options(common)
    run: Any = naive_varlen.backward_varlen
    if fused:
        from fullstride.jvp.attention.backward import backward_varlen as run  # only GPUs have Triton

        options |= {"max_seqlen_q": longest_q, "max_seqlen_k": longest_k}
    dq, dk, dv, *of_tangents = run(go, gto, *qkv, *tangents, *saved, starts_q, starts_k, **options)
    return dq, dk, dv, None, None, *of_tangents


def _shapes_varlen(primals: Any, tangents: Any, settings: Sequence[Any]) -> Tensors:
    q, _, v, *_ = primals
    total, heads, _ = q.shape
    return _with_rows(q.new_empty(total, heads, v.shape[-1]), (heads, total), tangents)


VARLEN = register(
    DualOp(
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
        state=_state,
    )
)
