"""Functional calls of attention and norms inside somebody's forward, sent to the fused ops."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fullstride.jvp.attention.op import attention
from fullstride.jvp.dual import unpack_optional
from fullstride.jvp.norms.arguments import check_last
from fullstride.jvp.norms.op import group_norm, layer_norm, rms_norm
from fullstride.jvp.subclasses import materialized

Size = list[int] | tuple[int, ...]


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if dropout_p > 0:
        raise ValueError(
            f"scaled_dot_product_attention has dropout_p={dropout_p} and a tangent, expected 0: fused attention has no "
            "dropout; train this model with attention dropout 0, or write the attention in plain operations"
        )
    options: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    alike = 1 if enable_gqa else 2
    if query.ndim == key.ndim == value.ndim == 4 and query.shape[:alike] == key.shape[:alike] == value.shape[:alike]:
        return attention(query, key, value, attn_mask=attn_mask, **options)
    q, k, v = _broadcast((query, key, value), enable_gqa)
    mask = None if attn_mask is None else materialized("attn_mask", attn_mask)
    if mask is not None and mask.ndim > 3:
        mask = mask.expand(*q.shape[:-3], *mask.shape[-3:]).flatten(0, -4)
    out = attention(*map(_as_batch, (q, k, v)), attn_mask=mask, **options)
    return out.reshape(*q.shape[:-1], v.shape[-1])


def _broadcast(tensors: tuple[Tensor, ...], enable_gqa: bool) -> list[Tensor]:
    """(..., H, L, D) of one shape in front of H, or of L where heads may not differ."""
    own = 3 if enable_gqa else 2
    lead = torch.broadcast_shapes(*(x.shape[:-own] for x in tensors))
    return [x.expand(*lead, *x.shape[-own:]) for x in tensors]


def _as_batch(x: Tensor) -> Tensor:
    """(..., L, D) as (B, H, L, D)."""
    return x.flatten(0, -4) if x.ndim > 3 else x[(None,) * (4 - x.ndim)]


def _layer_norm(
    input: Tensor,  # noqa: A002
    normalized_shape: Size,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    check_last(input, normalized_shape)
    n = len(normalized_shape)
    weight, bias = (None if p is None else p.flatten() for p in (weight, bias))
    return layer_norm(input.flatten(-n), weight, bias, eps).reshape(input.shape)


def _rms_norm(
    input: Tensor,  # noqa: A002
    normalized_shape: Size,
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    check_last(input, normalized_shape)
    weight = None if weight is None else weight.flatten()
    return rms_norm(input.flatten(-len(normalized_shape)), weight, eps).reshape(input.shape)


def _group_norm(
    input: Tensor,  # noqa: A002
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    return group_norm(input, num_groups, weight, bias, eps)


def _multi_head(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """In plain operations, which it takes where it returns its weights: they have torch's own derivatives."""
    given: list[Any] = list(args)
    if len(given) > NEED_WEIGHTS:
        asked, given[NEED_WEIGHTS] = given[NEED_WEIGHTS], True
    else:
        asked, kwargs = kwargs.get("need_weights", True), kwargs | {"need_weights": True}
    out, weights = F.multi_head_attention_forward(*given, **kwargs)
    return out, weights if asked else None


# Where F.multi_head_attention_forward has it among its arguments.
NEED_WEIGHTS = 15
ROUTES = {
    F.scaled_dot_product_attention: _attention,
    F.multi_head_attention_forward: _multi_head,
    F.layer_norm: _layer_norm,
    F.rms_norm: _rms_norm,
    F.group_norm: _group_norm,
}
NAMES = frozenset(f.__name__ for f in ROUTES)


class Routed(TorchFunctionMode):
    """Sends functional calls that carry a tangent to the fused ops."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Run one call."""
        kwargs = kwargs or {}
        route = ROUTES.get(func)
        tensors = (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        if route is not None and any(unpack_optional(x)[1] is not None for x in tensors):
            return route(*args, **kwargs)
        # A method in Python that calls super(), which the compiler cannot follow through a mode.
        if torch.compiler.is_compiling() and func is Tensor.unflatten:
            return torch.ops.aten.unflatten.int(*args, **kwargs)
        return func(*args, **kwargs)
