"""Norms in elementary operations on duals, each of which has every derivative; statistics are fp32 or better.

PyTorch's own norms have a wrong gradient through their tangent: its rule takes the saved statistics for constants.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fullstride.jvp.norms.layout import over_pixels


def normalised(x: Tensor, dims: tuple[int, ...], eps: float, centred: bool = True) -> Tensor:
    """(x - mean) / sqrt(mean square + eps) over some dimensions, in fp32 or better."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))  # squares of fp16 are infinite from 256 on
    x = x - x.mean(dims, keepdim=True) if centred else x
    return x * torch.rsqrt(x.square().mean(dims, keepdim=True) + eps)


def affine(y: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """y weight + bias, of parameters that broadcast."""
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Layer normalisation of the last dimension."""
    return affine(normalised(x, (-1,), eps), weight, bias)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float | None) -> Tensor:
    """Root-mean-square normalisation of the last dimension."""
    step = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps if eps is None else eps
    return affine(normalised(x, (-1,), step, centred=False), weight, None)


def ada_layer_norm(x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
    """(1 + scale) layer_norm(x) + shift, each sample with its own."""
    one = (x.shape[0], *[1] * (x.ndim - 2), x.shape[-1])
    return affine(normalised(x, (-1,), eps), 1 + scale.reshape(one), shift.reshape(one))


def group_norm(
    x: Tensor,
    shift: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    groups: int,
    eps: float,
    act: str | None,
) -> Tensor:
    """Group normalisation, with SiLU behind it if `act` is given."""
    if shift is not None:
        x = x.to(torch.promote_types(x.dtype, torch.float32)) + over_pixels(shift, x)
    grouped = x.unflatten(1, (groups, -1))
    y = normalised(grouped, tuple(range(2, grouped.ndim)), eps).flatten(1, 2)
    y = affine(y, per_channel(weight, x), per_channel(bias, x))
    return y if act is None else F.silu(y)


def per_channel(parameter: Tensor | None, x: Tensor) -> Tensor | None:
    """One number for each channel (dimension 1) of x, in a shape that broadcasts."""
    return None if parameter is None else parameter.reshape(-1, *[1] * (x.ndim - 2))
