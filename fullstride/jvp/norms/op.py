"""Norms on tensors and duals."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from fullstride.jvp.dual import pack, unpack_optional
from fullstride.jvp.mixed_batch import Batch, Partial, taken_apart
from fullstride.jvp.norms import dispatch, written_out
from fullstride.jvp.norms.explicit import Channels, Row
from fullstride.jvp.state import gradient_inside, tangent_grad, without_own_modes

Rows = Float[Batch, "*s d"]
Samples = Float[Batch, "b *n d"]
Modulation = Float[Batch, "b *one d"]
Images = Float[Batch, "b c *s"]


def layer_norm(
    x: Rows,
    weight: Row | None = None,
    bias: Row | None = None,
    eps: float = 1e-5,
    *,
    dtype: torch.dtype | None = None,
    implementation: str = "auto",
) -> Rows:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dimension (arXiv:1607.06450), fused under `jvp`.

    Args:
        x: rows, in any float format; statistics are fp32 or better.
        weight: of the columns; none is one.
        bias: of the columns; none is zero.
        eps: added to the variance.
        dtype: of the result, and x is then not cast under autocast either; none is x's.
        implementation: `auto`, the kernels where they run and x carries a tangent; `fused`, also where it carries none;
            or `plain` or `triton`.

    Returns:
        The normalised rows, in `dtype`, or else in x's format (under CUDA's autocast in fp32, as
        `torch.nn.functional.layer_norm`).

    Raises:
        ValueError: for parameters of another width, or an implementation that there is not.
        RuntimeError: under a jvp of a jvp or of a vmap, and of a gradient of what is not the library's own op.

    """
    return _of(dispatch.layer_norm, (x,), (weight, bias), (eps, dtype, implementation))


def rms_norm(
    x: Rows,
    weight: Row | None = None,
    eps: float | None = None,
    *,
    dtype: torch.dtype | None = None,
    implementation: str = "auto",
) -> Rows:
    """X / sqrt(mean(x^2) + eps) * weight over the last dimension (arXiv:1910.07467), fused under `jvp`.

    Args:
        x: rows, in any float format; statistics are fp32 or better.
        weight: of the columns; none is one.
        eps: added to the mean square; none is the smallest step of x's format, as in `torch.nn.functional.rms_norm`.
        dtype: of the result, and x is then not cast under autocast either; none is x's.
        implementation: `auto`, the kernels where they run and x carries a tangent; `fused`, also where it carries none;
            or `plain` or `triton`.

    Returns:
        The normalised rows, in `dtype`, or else in x's format (under CUDA's autocast in fp32).

    Raises:
        ValueError: for a weight of another width, or an implementation that there is not.
        RuntimeError: under a jvp of a jvp or of a vmap, and of a gradient of what is not the library's own op.

    """
    return _of(dispatch.rms_norm, (x,), (weight,), (eps, dtype, implementation))


def ada_layer_norm(
    x: Samples,
    scale: Modulation,
    shift: Modulation,
    eps: float = 1e-6,
    *,
    dtype: torch.dtype | None = None,
    implementation: str = "auto",
) -> Samples:
    """(1 + scale) layer_norm(x) + shift, each sample with its own (arXiv:2212.09748), fused under `jvp`.

    Args:
        x: (B, N, D) or (B, D).
        scale: (B, D) or (B, 1, D).
        shift: likewise.
        eps: added to the variance.
        dtype: of the result, and x is then not cast under autocast either; none is x's.
        implementation: `auto`, the kernels where they run and x carries a tangent; `fused`, also where it carries none;
            or `plain` or `triton`.

    Returns:
        The modulated rows, in `dtype`, or else in x's format.

    Raises:
        ValueError: for shapes that do not fit, or an implementation that there is not.
        RuntimeError: under a jvp of a jvp or of a vmap, and of a gradient of what is not the library's own op.

    """
    return _of(dispatch.ada_layer_norm, (x, scale, shift), (), (eps, dtype, implementation))


def group_norm(
    x: Images,
    groups: int,
    weight: Channels | None = None,
    bias: Channels | None = None,
    eps: float = 1e-5,
    act: str | None = None,
    *,
    dtype: torch.dtype | None = None,
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
        dtype: of the result, and x is then not cast under autocast either; none is x's.
        implementation: `auto`, the kernels where they run and x carries a tangent; `fused`, also where it carries none;
            or `plain` or `triton`.

    Returns:
        The normalised images, in `dtype`, or else in x's format (under CUDA's autocast in fp32).

    Raises:
        ValueError: for a number of groups that does not divide the channels, parameters of another width, another act
            or an implementation that there is not.
        RuntimeError: under a jvp of a jvp or of a vmap, and of a gradient of what is not the library's own op.

    """
    return _of(dispatch.group_norm, (x,), (weight, bias), (groups, eps, act, dtype, implementation))


Given = tuple[Tensor | None, ...]
Norm = Callable[..., dispatch.Pair]
WRITTEN_OUT: dict[Norm, Callable[..., Tensor]] = {
    dispatch.layer_norm: written_out.layer_norm,
    dispatch.rms_norm: written_out.rms_norm,
    dispatch.ada_layer_norm: written_out.ada_layer_norm,
    dispatch.group_norm: written_out.group_norm,
}


def _of(norm: Norm, samples: tuple[Batch, ...], parameters: Given, settings: tuple) -> Batch:
    """The norm of pairs, of duals or of a batch some of whose samples carry a tangent."""
    if any(isinstance(x, Partial) for x in samples):
        return _of_some(norm, samples, parameters, settings)
    if gradient_inside():
        *options, dtype, _ = settings
        return WRITTEN_OUT[norm](*samples, *parameters, *options).to(dtype or samples[0].dtype)
    primals, tangents = zip(*map(unpack_optional, (*samples, *parameters)), strict=True)
    with without_own_modes():
        return pack(*norm(primals, tangents, *settings, tangent_grad()))


def _of_some(norm: Norm, samples: tuple[Batch, ...], parameters: Given, settings: tuple) -> Partial:
    """All primals at once as ever; the norm of the pairs again, for its tangent alone, where no kernel takes both."""
    primals, heads, tangents = taken_apart(samples)
    if norm is dispatch.group_norm:
        assert tangents[0] is not None
        both = dispatch.group_norm_of_some((*primals, *parameters), tangents[0], *settings)
        if both is not None:
            assert both[1] is not None
            return Partial(both[0], both[1])
    still = (None,) * len(parameters)
    out, _ = norm((*primals, *parameters), (None,) * (len(primals) + len(parameters)), *settings, False)
    with torch.no_grad():
        _, tangent = norm((*heads, *parameters), (*tangents, *still), *settings, False)
    assert tangent is not None
    return Partial(out, tangent)
