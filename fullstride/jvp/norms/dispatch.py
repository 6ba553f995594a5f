"""The norms of pairs: the library's own where nothing carries a tangent, else the op."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fullstride.jvp.dual import check_pair, refuse_gradient_inside_jvp
from fullstride.jvp.dual_op import PairOp
from fullstride.jvp.implementation import chosen
from fullstride.jvp.norms.arguments import check_format, check_groups, check_modulation, check_ndim, check_width
from fullstride.jvp.norms.register import ADA_LAYER_NORM, GROUP_NORM, LAYER_NORM, RMS_NORM
from fullstride.jvp.subclasses import materialized_all

Given = tuple[Tensor | None, ...]  # the first of the primals is never absent
Pair = tuple[Tensor, Tensor | None]
Dtype = torch.dtype | None  # of the results; none is x's
# What the kernels hold on the chip.
LONGEST_ROW, MOST_CHANNELS = 16384, 4096


def layer_norm(
    primals: Given, tangents: Given, eps: float, dtype: Dtype, implementation: str, tangent_grad: bool
) -> Pair:
    """Of (x, weight, bias)."""
    x, weight, bias = _present(primals[0]), *primals[1:]
    check_ndim(x, 1, "(..., D)")
    check_width("weight", weight, x.shape[-1])
    check_width("bias", bias, x.shape[-1])
    library = lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b, eps)  # noqa: E731
    return _run(LAYER_NORM, primals, tangents, (eps, dtype), implementation, tangent_grad, library)


def rms_norm(
    primals: Given, tangents: Given, eps: float | None, dtype: Dtype, implementation: str, tangent_grad: bool
) -> Pair:
    """Of (x, weight)."""
    x, weight = _present(primals[0]), primals[1]
    check_ndim(x, 1, "(..., D)")
    check_width("weight", weight, x.shape[-1])
    step = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps if eps is None else eps
    library = lambda x, w: F.rms_norm(x, x.shape[-1:], w, eps)  # noqa: E731
    return _run(RMS_NORM, primals, tangents, (step, dtype), implementation, tangent_grad, library)


def ada_layer_norm(
    primals: Given, tangents: Given, eps: float, dtype: Dtype, implementation: str, tangent_grad: bool
) -> Pair:
    """Of (x, scale, shift)."""
    check_ndim(_present(primals[0]), 2, "(B, ..., D)")
    for name, value in zip(("scale", "shift"), primals[1:], strict=True):
        check_modulation(name, _present(value), _present(primals[0]))

    def library(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        one = (x.shape[0], *[1] * (x.ndim - 2), x.shape[-1])
        y = F.layer_norm(x, x.shape[-1:], eps=eps)
        return (y * (1 + scale.reshape(one)) + shift.reshape(one)).to(y.dtype)

    return _run(ADA_LAYER_NORM, primals, tangents, (eps, dtype), implementation, tangent_grad, library)


def group_norm(
    primals: Given,
    tangents: Given,
    groups: int,
    eps: float,
    act: str | None,
    dtype: Dtype,
    implementation: str,
    tangent_grad: bool,
) -> Pair:
    """Of (x, weight, bias)."""
    _check_group_norm(primals, groups, act)

    def library(x: Tensor, w: Tensor | None, b: Tensor | None) -> Tensor:
        y = F.group_norm(x, groups, w, b, eps)
        return y if act is None else F.silu(y)

    return _run(GROUP_NORM, primals, tangents, (groups, eps, act or "", dtype), implementation, tangent_grad, library)


def group_norm_of_some(
    primals: Given, tangent: Tensor, groups: int, eps: float, act: str | None, dtype: Dtype, implementation: str
) -> Pair | None:
    """Of (x, weight, bias) and the tangent of x's first samples, in one kernel; None where the kernels do not run."""
    x, settings = _present(primals[0]), (groups, eps, act or "", dtype)
    runs = chosen("auto" if implementation == "fused" else implementation, x, _fits(GROUP_NORM, x, settings))
    if runs != "triton":
        return None
    _check_group_norm(primals, groups, act)
    check_format(dtype)
    check_pair(x[: len(tangent)], tangent)
    refuse_gradient_inside_jvp()
    primals, tangents = _materialized(GROUP_NORM.primals, primals), _materialized(("tx",), (tangent,))
    tangents = (*tangents, None, None)
    if dtype is None:
        primals, tangents = (tuple(map(_autocast, half)) for half in (primals, tangents))
    return GROUP_NORM(primals, tangents, (*settings, runs), False)


def _check_group_norm(primals: Given, groups: int, act: str | None) -> None:
    x, weight, bias = _present(primals[0]), *primals[1:]
    check_ndim(x, 2, "(B, C, ...)")
    check_width("weight", weight, x.shape[1])
    check_width("bias", bias, x.shape[1])
    check_groups(groups, x.shape[1], act)


def _run(
    op: PairOp,
    primals: Given,
    tangents: Given,
    settings: Sequence[Any],
    implementation: str,
    tangent_grad: bool,
    library: Callable[..., Tensor],
) -> Pair:
    dtype: Dtype = settings[-1]
    check_format(dtype)
    for primal, tangent in zip(primals, tangents, strict=True):
        check_pair(primal, tangent)
    x, still = _present(primals[0]), all(tangent is None for tangent in tangents)
    fits, named = _fits(op, x, settings), "auto" if implementation == "fused" else implementation
    runs = chosen(named, x, fits)
    if still and (implementation == "auto" or (implementation == "fused" and runs == "plain")):
        return _of_library(library, primals, dtype), None
    refuse_gradient_inside_jvp()
    primals, tangents = _materialized(op.primals, primals), _materialized(op.tangents, tangents)
    if dtype is None:
        primals, tangents = (tuple(map(_autocast, half)) for half in (primals, tangents))
    return op(primals, tangents, (*settings, runs), tangent_grad)


def _of_library(library: Callable[..., Tensor], primals: Given, dtype: Dtype) -> Tensor:
    """The library's own op; one with a format for its result is computed in fp32 or better and rounded once."""
    if dtype is None:
        return library(*primals)
    full = (None if p is None else p.to(torch.promote_types(p.dtype, torch.float32)) for p in primals)
    return library(*full).to(dtype)


def _fits(op: PairOp, x: Tensor, settings: Sequence[Any]) -> bool:
    """Whether the kernels take rows or groups as long."""
    if op is GROUP_NORM:
        return x.shape[1] // settings[0] <= MOST_CHANNELS
    return x.shape[-1] <= LONGEST_ROW


def _materialized(names: tuple[str, ...], tensors: Given) -> Given:
    return materialized_all(**dict(zip(names, tensors, strict=True)))


def _present(x: Tensor | None) -> Tensor:
    assert x is not None
    return x


def _autocast(x: Tensor | None) -> Tensor | None:
    """As autocast treats norms: in fp32, but on a CPU as they come."""
    if x is None or x.dtype not in (torch.float16, torch.bfloat16) or x.device.type == "cpu":
        return x
    return x.float() if torch.is_autocast_enabled(x.device.type) else x
