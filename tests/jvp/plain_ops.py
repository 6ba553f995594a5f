"""The ops of `fullstride.jvp` in elementary operations, all of whose derivatives torch computes correctly."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.jvp.attention.math_form import visible


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    window: tuple[int, int] | None = None,
) -> Tensor:
    """softmax(scale q k^T + mask) v, with zeros where a query sees nothing."""
    if enable_gqa:
        k, v = (x.repeat_interleave(q.shape[-3] // k.shape[-3], -3) for x in (k, v))
    s = (q @ k.mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    seen = visible(q.shape[-2], k.shape[-2], is_causal, window).expand(s.shape)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        seen = seen & attn_mask
    elif attn_mask is not None:
        seen, s = seen & (attn_mask > -torch.inf), s + attn_mask.clamp(min=-1e4)
    # A finite stand-in for -inf keeps torch's derivatives free of NaN where a row sees nothing.
    return (torch.softmax(s.masked_fill(~seen, -1e4), -1) * seen) @ v


def normalised(x: Tensor, dims: tuple[int, ...], eps: float, centred: bool = True) -> Tensor:
    """(x - mean) / sqrt(mean square + eps)."""
    x = x - x.mean(dims, keepdim=True) if centred else x
    return x * torch.rsqrt(x.square().mean(dims, keepdim=True) + eps)


def affine(y: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Y weight + bias, either of which may be absent."""
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """Normalise over the last dimension."""
    return affine(normalised(x, (-1,), eps), weight, bias)


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """Normalise over the last dimension."""
    step = torch.finfo(x.dtype).eps if eps is None else eps
    return affine(normalised(x, (-1,), step, centred=False), weight, None)


def ada_layer_norm(x: Tensor, scale: Tensor, shift: Tensor, eps: float = 1e-6) -> Tensor:
    """Each sample with its own scale and shift."""
    one = (x.shape[0], *[1] * (x.ndim - 2), x.shape[-1])
    return normalised(x, (-1,), eps) * (1 + scale.reshape(one)) + shift.reshape(one)


def group_norm(
    x: Tensor,
    groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    act: str | None = None,
) -> Tensor:
    """Normalise over each group's channels and pixels."""
    one = (-1, *[1] * (x.ndim - 2))
    parameters = [None if p is None else p.reshape(one) for p in (weight, bias)]
    grouped = x.reshape(x.shape[0], groups, -1)
    y = affine(normalised(grouped, (-1,), eps).reshape(x.shape), *parameters)
    return y if act is None else F.silu(y)
