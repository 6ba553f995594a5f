"""Norms on tensors and duals; functions named `*_dual` take explicit primals and tangents.

A norm whose arguments carry a tangent runs as this package's op; without a tangent it is torch's own, unless another
`implementation` is given. Statistics are fp32 or better.
"""

import torch
from jaxtyping import Float

from fullstride.jvp.dual import pack, unpack_all
from fullstride.jvp.mixed_batch import Batch, MixedBatch, split_mixed
from fullstride.jvp.norms import dispatch
from fullstride.jvp.norms.dispatch import Dtype, Given, Norm
from fullstride.jvp.norms.layout import over_pixels
from fullstride.jvp.norms.shapes import Channels, Image, Modulation, Row, Rows, SampleChannels, Samples
from fullstride.jvp.state import gradient_inside, tangent_grad, without_own_modes

RowsOf = Float[Batch, "*s d"]
SamplesOf = Float[Batch, "b *n d"]
ModulationOf = Float[Batch, "b *one d"]
ImagesOf = Float[Batch, "b c *s"]
ShiftOf = Float[Batch, "b c"]


def layer_norm(
    x: RowsOf,
    weight: Row | None = None,
    bias: Row | None = None,
    eps: float = 1e-5,
    *,
    dtype: Dtype = None,
    implementation: str = "auto",
) -> RowsOf:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dimension (arXiv:1607.06450), fused under `jvp`.

    Args:
        x: rows, in any float format; statistics are fp32 or better.
        weight: scale of each column; None is one.
        bias: shift of each column; None is zero.
        eps: added to the variance.
        dtype: format of the result; x is then not cast under autocast either. None means x's format.
        implementation: `auto`, the kernels if they run and x carries a tangent; `fused`, also if it carries none;
            or `plain` or `triton`.

    Returns:
        The normalised rows, in `dtype`, or else in x's format (under CUDA's autocast in fp32, as
        `torch.nn.functional.layer_norm`).

    Raises:
        ValueError: for parameters of another width, or an unknown implementation.
        RuntimeError: under a jvp of a jvp or of a vmap, and under a jvp of a gradient unless torch's own op runs.

    """
    return _apply(dispatch.layer_norm, (x,), (weight, bias), (eps,), dtype, implementation)


def rms_norm(
    x: RowsOf,
    weight: Row | None = None,
    eps: float | None = None,
    *,
    dtype: Dtype = None,
    implementation: str = "auto",
) -> RowsOf:
    """X / sqrt(mean(x^2) + eps) * weight over the last dimension (arXiv:1910.07467), fused under `jvp`.

    As `layer_norm`, but `eps` is added to the mean square, and None is the smallest step of x's format, as in
    `torch.nn.functional.rms_norm`.
    """
    return _apply(dispatch.rms_norm, (x,), (weight,), (eps,), dtype, implementation)


def ada_layer_norm(
    x: SamplesOf,
    scale: ModulationOf,
    shift: ModulationOf,
    eps: float = 1e-6,
    *,
    dtype: Dtype = None,
    implementation: str = "auto",
) -> SamplesOf:
    """(1 + scale) layer_norm(x) + shift, each sample with its own (arXiv:2212.09748), fused under `jvp`.

    As `layer_norm`, of x (B, N, D) or (B, D), and of a scale and a shift (B, D) or (B, 1, D).
    """
    return _apply(dispatch.ada_layer_norm, (x, scale, shift), (), (eps,), dtype, implementation)


def group_norm(
    x: ImagesOf,
    groups: int,
    weight: Channels | None = None,
    bias: Channels | None = None,
    eps: float = 1e-5,
    act: str | None = None,
    *,
    shift: ShiftOf | None = None,
    dtype: Dtype = None,
    implementation: str = "auto",
) -> ImagesOf:
    """Group normalisation (arXiv:1803.08494), followed by SiLU if `act` is given, fused under `jvp`.

    Args:
        x: images (B, C, ...), contiguous or channels_last; the output keeps the memory format.
        groups: number of groups, all with the same number of channels.
        weight: scale of each channel; None is one.
        bias: shift of each channel; None is zero.
        eps: added to the variance.
        act: activation after the norm: None or "silu".
        shift: numbers (B, C) added to the channels of each sample before the norm, as a U-Net's conditioning is.
        dtype: see `layer_norm`.
        implementation: see `layer_norm`.

    Returns:
        The normalised images, in `dtype`, or else in x's format (under CUDA's autocast in fp32).

    Raises:
        ValueError: for a number of groups that does not divide the channels, an unknown act, a shift of another shape,
            and as in `layer_norm`.
        RuntimeError: see `layer_norm`.

    """
    if shift is not None:
        dispatch.check_shift(x, shift)
        if not dispatch.holds_groups(x, groups, act):  # then the sum is saved, and not made again in the backward pass
            x, shift = x + over_pixels(shift, x), None
    return _apply(dispatch.group_norm, (x, shift), (weight, bias), (groups, eps, act), dtype, implementation)


def layer_norm_dual(
    x: Rows,
    weight: Row | None = None,
    bias: Row | None = None,
    tx: Rows | None = None,
    tweight: Row | None = None,
    tbias: Row | None = None,
    *,
    eps: float = 1e-5,
    dtype: Dtype = None,
    implementation: str = "auto",
    tangent_grad: bool = True,
) -> tuple[Rows, Rows | None]:
    """`layer_norm` of explicit primals and tangents, for code that carries its tangents itself.

    Args:
        x: rows, as in `layer_norm`; so are all arguments that are not explained here.
        weight: scale of each column.
        bias: shift of each column.
        tx: tangent of x; None means zero, and its work is skipped.
        tweight: tangent of the weight.
        tbias: tangent of the bias.
        eps: added to the variance.
        dtype: format of the results.
        implementation: `auto`, `fused`, `plain` or `triton`.
        tangent_grad: whether gradients may be taken through the output's tangent; if not, nothing of it is saved.

    Returns:
        The output and its tangent. Without any tangent given, it is None and the output comes from torch's own ops.

    Raises:
        ValueError: as `layer_norm`, and for a tangent of another shape, dtype or device than its primal.

    """
    given = (x, weight, bias), (tx, tweight, tbias)
    return dispatch.layer_norm(*given, (eps,), dtype, implementation, tangent_grad)


def rms_norm_dual(
    x: Rows,
    weight: Row | None = None,
    tx: Rows | None = None,
    tweight: Row | None = None,
    *,
    eps: float | None = None,
    dtype: Dtype = None,
    implementation: str = "auto",
    tangent_grad: bool = True,
) -> tuple[Rows, Rows | None]:
    """`rms_norm` of explicit primals and tangents; see `layer_norm_dual`."""
    return dispatch.rms_norm((x, weight), (tx, tweight), (eps,), dtype, implementation, tangent_grad)


def ada_layer_norm_dual(
    x: Samples,
    scale: Modulation,
    shift: Modulation,
    tx: Samples | None = None,
    tscale: Modulation | None = None,
    tshift: Modulation | None = None,
    *,
    eps: float = 1e-6,
    dtype: Dtype = None,
    implementation: str = "auto",
    tangent_grad: bool = True,
) -> tuple[Samples, Samples | None]:
    """`ada_layer_norm` of explicit primals and tangents, those of the primals' shapes; see `layer_norm_dual`."""
    given = (x, scale, shift), (tx, tscale, tshift)
    return dispatch.ada_layer_norm(*given, (eps,), dtype, implementation, tangent_grad)


def group_norm_dual(
    x: Image,
    groups: int,
    weight: Channels | None = None,
    bias: Channels | None = None,
    tx: Image | None = None,
    tweight: Channels | None = None,
    tbias: Channels | None = None,
    *,
    shift: SampleChannels | None = None,
    tshift: SampleChannels | None = None,
    eps: float = 1e-5,
    act: str | None = None,
    dtype: Dtype = None,
    implementation: str = "auto",
    tangent_grad: bool = True,
) -> tuple[Image, Image | None]:
    """`group_norm` of explicit primals and tangents; see `layer_norm_dual`."""
    given = (x, shift, weight, bias), (tx, tshift, tweight, tbias)
    return dispatch.group_norm(*given, (groups, eps, act), dtype, implementation, tangent_grad)


def _apply(
    norm: Norm, samples: tuple[Batch | None, ...], parameters: Given, settings: tuple, dtype: Dtype, implementation: str
) -> Batch:
    """Compute the norm of tensors, of duals or of a batch in which only some samples carry a tangent."""
    x = samples[0]
    assert x is not None
    if any(isinstance(each, MixedBatch) for each in samples):
        return _of_some(norm, samples, parameters, settings, dtype, implementation)
    if gradient_inside():
        return norm.written_out(*samples, *parameters, *settings).to(dtype or x.dtype)
    with without_own_modes():
        primals, tangents = zip(*unpack_all(*samples, *parameters), strict=True)
        return pack(*norm(primals, tangents, settings, dtype, implementation, tangent_grad()))


def _of_some(
    norm: Norm, samples: tuple[Batch | None, ...], parameters: Given, settings: tuple, dtype: Dtype, implementation: str
) -> MixedBatch:
    """Compute the norm of all primals at once, then again for the tangent of some, if no kernel does both."""
    primals, heads, tangents = split_mixed(samples)
    still = (None,) * len(parameters)
    both = norm.first((*primals, *parameters), (*tangents,), settings, dtype, implementation)
    if both is None:
        of_all = (*primals, *parameters), (None,) * len(primals) + still
        out, _ = norm(*of_all, settings, dtype, implementation, False)
        with torch.no_grad():
            of_some = (*heads, *parameters), (*tangents, *still)
            both = out, norm(*of_some, settings, dtype, implementation, False)[1]
    assert both[1] is not None
    return MixedBatch(both[0], both[1])
