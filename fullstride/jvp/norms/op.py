"""Norms on tensors and duals."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from fullstride.jvp.dual import pack, refuse_gradient_inside_jvp, unpack_optional
from fullstride.jvp.implementation import chosen
from fullstride.jvp.norms.pairs import ADA_LAYER_NORM, GROUP_NORM, LAYER_NORM, RMS_NORM
from fullstride.jvp.recipe import PairOp
from fullstride.jvp.transform import tangent_grad

Rows = Float[Tensor, "*s d"]
Row = Float[Tensor, " d"]
Images = Float[Tensor, "b c *s"]
Channels = Float[Tensor, " c"]
# What the kernels hold on the chip.
LONGEST_ROW, MOST_CHANNELS = 16384, 4096


def layer_norm(
    x: Rows, weight: Row | None = None, bias: Row | None = None, eps: float = 1e-5, *, implementation: str = "auto"
) -> Rows:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dimension (arXiv:1607.06450), fused under `jvp`.

    Args:
        x: rows, in any float format; statistics are fp32 or better.
        weight: of the columns; none is one.
        bias: of the columns; none is zero.
        eps: added to the variance.
        implementation: `auto`, or one by name: `plain` or `triton`.

    Returns:
        The normalised rows, in x's format (under CUDA's autocast in fp32, as `torch.nn.functional.layer_norm`).

    Raises:
        ValueError: for parameters of another width, or an implementation that there is not.
        RuntimeError: under a jvp of a jvp or of a vmap, and of a gradient of what is not the library's own op.

    """
    _check_width("weight", weight, x.shape[-1])
    _check_width("bias", bias, x.shape[-1])
    return _run(
        LAYER_NORM, (x, weight, bias), (eps,), implementation, lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b, eps)
    )


def rms_norm(x: Rows, weight: Row | None = None, eps: float | None = None, *, implementation: str = "auto") -> Rows:
    """X / sqrt(mean(x^2) + eps) * weight over the last dimension (arXiv:1910.07467), fused under `jvp`.

    Args:
        x: rows, in any float format; statistics are fp32 or better.
        weight: of the columns; none is one.
        eps: added to the mean square; none is the smallest step of x's format, as in `torch.nn.functional.rms_norm`.
        implementation: `auto`, or one by name: `plain` or `triton`.

    Returns:
        The normalised rows, in x's format (under CUDA's autocast in fp32).

    Raises:
        ValueError: for a weight of another width, or an implementation that there is not.
        RuntimeError: under a jvp of a jvp or of a vmap, and of a gradient of what is not the library's own op.

    """
    _check_width("weight", weight, x.shape[-1])
    step = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps if eps is None else eps
    return _run(RMS_NORM, (x, weight), (step,), implementation, lambda x, w: F.rms_norm(x, x.shape[-1:], w, eps))


def ada_layer_norm(
    x: Float[Tensor, "b *n d"],
    scale: Float[Tensor, "b *one d"],
    shift: Float[Tensor, "b *one d"],
    eps: float = 1e-6,
    *,
    implementation: str = "auto",
) -> Float[Tensor, "b *n d"]:
    """(1 + scale) layer_norm(x) + shift, each sample with its own (arXiv:2212.09748), fused under `jvp`.

    Args:
        x: (B, N, D) or (B, D).
        scale: (B, D) or (B, 1, D).
        shift: likewise.
        eps: added to the variance.
        implementation: `auto`, or one by name: `plain` or `triton`.

    Returns:
        The modulated rows, in x's format.

    Raises:
        ValueError: for shapes that do not fit, or an implementation that there is not.
        RuntimeError: under a jvp of a jvp or of a vmap, and of a gradient of what is not the library's own op.

    """
    for name, value in (("scale", scale), ("shift", shift)):
        if value.numel() != x.shape[0] * x.shape[-1] or value.shape[0] != x.shape[0] or value.shape[-1] != x.shape[-1]:
            raise ValueError(f"{name} is {tuple(value.shape)}, expected one row a sample: {(x.shape[0], x.shape[-1])}")

    def library(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        one = (x.shape[0], *[1] * (x.ndim - 2), x.shape[-1])
        y = F.layer_norm(x, x.shape[-1:], eps=eps)
        return (y * (1 + scale.reshape(one)) + shift.reshape(one)).to(y.dtype)

    return _run(ADA_LAYER_NORM, (x, scale, shift), (eps,), implementation, library)


def group_norm(
    x: Images,
    groups: int,
    weight: Channels | None = None,
    bias: Channels | None = None,
    eps: float = 1e-5,
    act: str | None = None,
    *,
    implementation: str = "auto",
) -> Images:
    """Group normalisation (arXiv:1803.08494), with SiLU behind it if asked for, fused under `jvp`.

    Args:
        x: images (B, C, ...), contiguous or channels_last; the output keeps the memory format.
        groups: of the channels, equal ones.
        weight: of the channels; none is one.
        bias: of the channels; none is zero.
        eps: added to the variance.
        act: None, or "silu".
        implementation: `auto`, or one by name: `plain` or `triton`.

    Returns:
        The normalised images, in x's format (under CUDA's autocast in fp32).

    Raises:
        ValueError: for a number of groups that does not divide the channels, parameters of another width, another act
            or an implementation that there is not.
        RuntimeError: under a jvp of a jvp or of a vmap, and of a gradient of what is not the library's own op.

    """
    _check_width("weight", weight, x.shape[1])
    _check_width("bias", bias, x.shape[1])
    if groups < 1 or x.shape[1] % groups:
        raise ValueError(f"groups is {groups}, expected a divisor of the {x.shape[1]} channels")
    if act not in (None, "silu"):
        raise ValueError(f"act is {act!r}, expected None or 'silu'")

    def library(x: Tensor, w: Tensor | None, b: Tensor | None) -> Tensor:
        y = F.group_norm(x, groups, w, b, eps)
        return y if act is None else F.silu(y)

    return _run(GROUP_NORM, (x, weight, bias), (groups, eps, act or ""), implementation, library)


def _check_width(name: str, parameter: Tensor | None, width: int) -> None:
    if parameter is not None and parameter.shape != (width,):
        raise ValueError(f"{name} is {tuple(parameter.shape)}, expected {(width,)}")


def _run(op: PairOp, tensors: tuple[Tensor | None, ...], settings: tuple, implementation: str, library) -> Tensor:
    """The library's own op where nothing carries a tangent, else the op on pairs."""
    pairs = [unpack_optional(x) for x in tensors]
    if implementation == "auto" and all(tangent is None for _, tangent in pairs):
        return library(*tensors)
    refuse_gradient_inside_jvp()
    primals, tangents = ([_autocast(x) for x in half] for half in zip(*pairs, strict=True))
    chosen_one = chosen(implementation, _present(primals), _fits(op, _present(primals), settings))
    return pack(*op(primals, tangents, (*settings, chosen_one), tangent_grad()))


def _fits(op: PairOp, x: Tensor, settings: tuple) -> bool:
    """Whether the kernels take rows or groups as long."""
    if op is GROUP_NORM:
        return x.shape[1] // settings[0] <= MOST_CHANNELS
    return x.shape[-1] <= LONGEST_ROW


def _present(primals: list[Tensor | None]) -> Tensor:
    x = primals[0]
    assert x is not None
    return x


def _autocast(x: Tensor | None) -> Tensor | None:
    """As autocast treats norms: in fp32, but on a CPU as they come."""
    if x is None or x.dtype not in (torch.float16, torch.bfloat16) or x.device.type == "cpu":
        return x
    return x.float() if torch.is_autocast_enabled(x.device.type) else x
