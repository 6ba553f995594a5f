"""The norms of `torch.nn.functional` and `torch`, by their own signatures, through this package's ops."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fullstride.jvp.dual import constant, inside_transform
from fullstride.jvp.mixed_batch import Batch
from fullstride.jvp.norms import api, written_out
from fullstride.jvp.norms.written_out import affine, normalised, per_channel

Size = Sequence[int]


def as_rows(x: Batch, normalized: Size, *parameters: Tensor | None) -> list[Any]:
    """Several normalised dimensions as one, of x and of parameters of their shape."""
    if x.shape[-len(normalized) :] != tuple(normalized):
        raise ValueError(f"x is {tuple(x.shape)}, expected its last dimensions to be {tuple(normalized)}")
    if len(normalized) == 1:
        return [x, *parameters]
    return [x.flatten(-len(normalized)), *(None if p is None else p.flatten() for p in parameters)]


def in_shape_of(x: Batch, rows: Batch, out: Batch) -> Batch:
    """Return the norm of x's rows in x's shape."""
    return out if rows is x else out.reshape(x.shape)


def layer_norm(
    input: Tensor,  # noqa: A002
    normalized_shape: Size,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    """Compute `F.layer_norm` (or `torch.layer_norm`) by this package's op."""
    rows, w, b = as_rows(input, normalized_shape, weight, bias)
    if inside_transform():
        out = written_out.layer_norm(rows, w, b, eps).to(input.dtype)
    else:
        out = api.layer_norm(rows, w, b, eps)
    return in_shape_of(input, rows, out)


def rms_norm(
    input: Tensor,  # noqa: A002
    normalized_shape: Size,
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """Compute `F.rms_norm` (or `torch.rms_norm`) by this package's op."""
    rows, w = as_rows(input, normalized_shape, weight)
    out = written_out.rms_norm(rows, w, eps).to(input.dtype) if inside_transform() else api.rms_norm(rows, w, eps)
    return in_shape_of(input, rows, out)


def group_norm(
    input: Tensor,  # noqa: A002
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    """Compute `F.group_norm` (or `torch.group_norm`) by this package's op."""
    if inside_transform():
        return written_out.group_norm(input, None, weight, bias, num_groups, eps, None).to(input.dtype)
    return api.group_norm(input, num_groups, weight, bias, eps)


def batch_norm(
    input: Tensor,  # noqa: A002
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    """Compute `F.batch_norm`; the primal updates the running statistics."""
    if training or running_mean is None or running_var is None:
        with torch.no_grad():  # counts, and refuses a single value per channel
            F.batch_norm(constant(input), running_mean, running_var, None, None, True, momentum, eps)
        y = normalised(input, (0, *range(2, input.ndim)), eps)
    else:
        y = _by_running(input, running_mean, running_var, eps)
    return affine(y, per_channel(weight, input), per_channel(bias, input)).to(input.dtype)


def instance_norm(
    input: Tensor,  # noqa: A002
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    """Compute `F.instance_norm`; with the input's statistics it is a group norm of one channel per group."""
    if not use_input_stats:
        assert running_mean is not None
        assert running_var is not None
        y = _by_running(input, running_mean, running_var, eps)
        return affine(y, per_channel(weight, input), per_channel(bias, input)).to(input.dtype)
    if running_mean is not None or math.prod(input.shape[2:]) == 1:
        with torch.no_grad():  # counts, and refuses a single value
            F.instance_norm(constant(input), running_mean, running_var, None, None, True, momentum, eps)
    return group_norm(input, input.shape[1], weight, bias, eps)


def _by_running(x: Tensor, mean: Tensor, var: Tensor, eps: float) -> Tensor:
    full = x.to(torch.promote_types(x.dtype, torch.float32))
    one = (-1, *[1] * (x.ndim - 2))
    return (full - mean.to(full.dtype).view(one)) * torch.rsqrt(var.to(full.dtype) + eps).view(one)


def _parameters_first(norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A norm of `torch.nn.functional` with the order of arguments that `torch` gives it."""

    def run(
        input: Tensor,  # noqa: A002
        weight: Any,
        bias: Any,
        running_mean: Any,
        running_var: Any,
        *rest: Any,
        **named: Any,
    ) -> Tensor:
        return norm(input, running_mean, running_var, weight, bias, *rest, **named)

    return run


ROUTES: dict[Any, Callable[..., Tensor]] = {
    F.layer_norm: layer_norm,
    F.rms_norm: rms_norm,
    F.group_norm: group_norm,
    F.batch_norm: batch_norm,
    F.instance_norm: instance_norm,
    torch.layer_norm: layer_norm,
    torch.rms_norm: rms_norm,
    torch.group_norm: group_norm,
    torch.batch_norm: _parameters_first(batch_norm),
    torch.instance_norm: _parameters_first(instance_norm),
}
