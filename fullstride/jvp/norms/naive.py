"""The dual norms in plain PyTorch: any device and float format. The reference, and what runs on a CPU.

Equations: `closed_form`. Half precision is computed in fp32. Every gradient comes back in the format of the tensor it
belongs to, y and ty in that of x or in `dtype`, mean and rstd in that of the computation. What is None is absent, and
its work is left out: ty is None if no tangent is given, and without gty (a tangent that the loss does not see) tx,
tweight and tbias get none.
"""

import torch
from torch import Tensor

from fullstride.jvp.norms.closed_form import Affine, Kind, backward, forward
from fullstride.jvp.norms.layout import images_like, row_major
from fullstride.jvp.norms.shapes import (
    Channels,
    Gradients,
    GroupMoment,
    Image,
    Modulation,
    Row,
    RowMoment,
    Rows,
    SampleMoment,
    Samples,
)

Shape = tuple[int, ...]
ROWS = Kind(dims=(-1,))


def layer_norm(
    x: Rows,
    tx: Rows | None,
    weight: Row | None,
    bias: Row | None,
    tweight: Row | None,
    tbias: Row | None,
    eps: float,
    dtype: torch.dtype | None = None,
) -> tuple[Rows, Rows | None, RowMoment, RowMoment]:
    """Layer normalisation of the last dimension (arXiv:1607.06450) with its tangent: y, ty, mean, rstd."""
    affine = _affine(weight, bias, tweight, tbias, x.shape[-1:])
    y, ty, mean, rstd = forward(_full(x), _maybe_full(tx), affine, ROWS, eps)
    return _shaped(y, row_major(x, dtype)), _rows(ty, x, dtype), mean.squeeze(-1), rstd.squeeze(-1)


def layer_norm_backward(
    gy: Rows,
    gty: Rows | None,
    x: Rows,
    tx: Rows | None,
    weight: Row | None,
    bias: Row | None,
    tweight: Row | None,
    tbias: Row | None,
    mean: RowMoment,
    rstd: RowMoment,
) -> Gradients:
    """Gradients of `layer_norm`'s (x, tx, weight, bias, tweight, tbias)."""
    inputs = (x, tx, weight, bias, tweight, tbias)
    return _gradients(gy, gty, inputs, x.shape[-1:], ROWS, mean[..., None], rstd[..., None])


def rms_norm(
    x: Rows,
    tx: Rows | None,
    weight: Row | None,
    tweight: Row | None,
    eps: float,
    dtype: torch.dtype | None = None,
) -> tuple[Rows, Rows | None, RowMoment]:
    """Root-mean-square normalisation of the last dimension (arXiv:1910.07467) with its tangent: y, ty, rstd."""
    affine = _affine(weight, None, tweight, None, x.shape[-1:])
    y, ty, _, rstd = forward(_full(x), _maybe_full(tx), affine, ROWS._replace(centred=False), eps)
    return _shaped(y, row_major(x, dtype)), _rows(ty, x, dtype), rstd.squeeze(-1)


def rms_norm_backward(
    gy: Rows,
    gty: Rows | None,
    x: Rows,
    tx: Rows | None,
    weight: Row | None,
    tweight: Row | None,
    rstd: RowMoment,
) -> Gradients:
    """Gradients of `rms_norm`'s (x, tx, weight, tweight)."""
    inputs, rstd, kind = (x, tx, weight, None, tweight, None), rstd[..., None], ROWS._replace(centred=False)
    dx, dtx, dweight, _, dtweight, _ = _gradients(gy, gty, inputs, x.shape[-1:], kind, torch.zeros_like(rstd), rstd)
    return dx, dtx, dweight, dtweight


def ada_layer_norm(
    x: Samples,
    tx: Samples | None,
    scale: Modulation,
    shift: Modulation,
    tscale: Modulation | None,
    tshift: Modulation | None,
    eps: float,
    dtype: torch.dtype | None = None,
) -> tuple[Samples, Samples | None, SampleMoment, SampleMoment]:
    """(1 + scale) layer_norm(x) + shift, each sample with its own (arXiv:2212.09748): y, ty, mean, rstd.

    x is (B, N, D) or (B, D); scale, shift and their tangents are (B, D) or (B, 1, D).
    """
    affine = _affine(1 + _full(scale), shift, tscale, tshift, _one_a_sample(x))
    y, ty, mean, rstd = forward(_full(x), _maybe_full(tx), affine, ROWS, eps)
    return _shaped(y, row_major(x, dtype)), _rows(ty, x, dtype), mean.squeeze(-1), rstd.squeeze(-1)


def ada_layer_norm_backward(
    gy: Samples,
    gty: Samples | None,
    x: Samples,
    tx: Samples | None,
    scale: Modulation,
    shift: Modulation,
    tscale: Modulation | None,
    tshift: Modulation | None,
    mean: SampleMoment,
    rstd: SampleMoment,
) -> Gradients:
    """Gradients of `ada_layer_norm`'s (x, tx, scale, shift, tscale, tshift)."""
    inputs = (x, tx, 1 + _full(scale), shift, tscale, tshift)
    found = _gradients(gy, gty, inputs, _one_a_sample(x), ROWS, mean[..., None], rstd[..., None])
    return (*found[:2], _rows(found[2], scale), *found[3:])


def group_norm(
    x: Image,
    tx: Image | None,
    groups: int,
    weight: Channels | None,
    bias: Channels | None,
    tweight: Channels | None,
    tbias: Channels | None,
    eps: float,
    act: str | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Image, Image | None, GroupMoment, GroupMoment]:
    """Group normalisation (arXiv:1803.08494) with its tangent, SiLU behind it if act is "silu": y, ty, mean, rstd.

    The outputs keep x's memory format.
    """
    affine = _affine(weight, bias, tweight, tbias, _one_a_channel(x, groups))
    kind = _group_kind(x, act)
    tangent = None if tx is None else _grouped(_full(tx), groups)
    y, ty, mean, rstd = forward(_grouped(_full(x), groups), tangent, affine, kind, eps)
    return _shaped(y, images_like(x, dtype)), _images(ty, x, dtype), mean.flatten(1), rstd.flatten(1)


def group_norm_backward(
    gy: Image,
    gty: Image | None,
    x: Image,
    tx: Image | None,
    groups: int,
    weight: Channels | None,
    bias: Channels | None,
    tweight: Channels | None,
    tbias: Channels | None,
    mean: GroupMoment,
    rstd: GroupMoment,
    act: str | None = None,
) -> Gradients:
    """Gradients of `group_norm`'s (x, tx, weight, bias, tweight, tbias)."""
    gty_grouped, tx_grouped = (None if a is None else _grouped(a, groups) for a in (gty, tx))
    inputs = (_grouped(x, groups), tx_grouped, weight, bias, tweight, tbias)
    shape, kind, one_a_group = _one_a_channel(x, groups), _group_kind(x, act), (*mean.shape, *[1] * (x.dim() - 1))
    moments = mean.view(one_a_group), rstd.view(one_a_group)
    dx, dtx, *rest = _gradients(_grouped(gy, groups), gty_grouped, inputs, shape, kind, *moments)
    return (_images(dx, x), _images(dtx, x), *rest)


def _full(a: Tensor) -> Tensor:
    return a.to(torch.promote_types(a.dtype, torch.float32))


def _maybe_full(a: Tensor | None) -> Tensor | None:
    return None if a is None else _full(a)


def _shaped(a: Tensor, out: Tensor) -> Tensor:
    """`a` in the shape, the memory layout and the format of an empty tensor."""
    a = a.reshape(out.shape)
    return a if a.dtype == out.dtype and a.stride() == out.stride() else out.copy_(a)


def _rows(a: Tensor | None, model: Tensor | None, dtype: torch.dtype | None = None) -> Tensor | None:
    """`a` in the shape of its model and, unless another is given, in its format."""
    return None if a is None or model is None else _shaped(a, row_major(model, dtype))


def _images(a: Tensor | None, model: Tensor, dtype: torch.dtype | None = None) -> Tensor | None:
    """`a` in the shape and memory format of its model."""
    return None if a is None else _shaped(a, images_like(model, dtype))


def _affine(
    weight: Tensor | None, bias: Tensor | None, tweight: Tensor | None, tbias: Tensor | None, shape: Shape
) -> Affine:
    """The parameters in full precision, in a shape that broadcasts to x's."""
    return Affine(*[None if p is None else _full(p).reshape(shape) for p in (weight, bias, tweight, tbias)])


def _gradients(
    gy: Tensor,
    gty: Tensor | None,
    inputs: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None],
    shape: Shape,
    kind: Kind,
    mean: Tensor,
    rstd: Tensor,
) -> Gradients:
    """The gradients of the inputs, each like its input; the parameters broadcast as `shape`."""
    x, tx, weight, bias, tweight, tbias = inputs
    affine = _affine(weight, bias, tweight, tbias, shape)
    found = backward(_full(gy), _maybe_full(gty), _full(x), _maybe_full(tx), affine, kind, mean, rstd)
    return tuple(_rows(gradient, of) for gradient, of in zip(found, inputs, strict=True))


def _one_a_sample(x: Tensor) -> Shape:
    return (x.shape[0], *[1] * (x.dim() - 2), x.shape[-1])


def _one_a_channel(x: Tensor, groups: int) -> Shape:
    return (1, groups, x.shape[1] // groups, *[1] * (x.dim() - 2))


def _grouped(a: Tensor, groups: int) -> Tensor:
    """(B, C, ...) seen as (B, G, C / G, ...)."""
    return a.unflatten(1, (groups, -1))


def _group_kind(x: Tensor, act: str | None) -> Kind:
    if act not in (None, "silu"):
        raise ValueError(f"act is {act!r}, expected None or 'silu'")
    return Kind(tuple(range(2, x.dim() + 1)), silu=act == "silu")
