"""The dual norms in plain PyTorch: any device and float format. They are the reference, and run on CPUs.

Equations: `closed_form`. Half precision is computed in fp32. Every gradient comes back in the format of the tensor it
belongs to, y and ty in that of x or in `dtype`, mean and rstd in that of the computation. What is None is absent, and
its work is left out: ty is None if no tangent is given, and without gty (a tangent that the loss does not see) tx,
tweight and tbias get none.
"""

import torch
from torch import Tensor

from fullstride.jvp.norms.closed_form import Affine, NormKind, RowNorm, backward, forward
from fullstride.jvp.norms.layout import images_like, over_pixels, row_major
from fullstride.jvp.norms.shapes import FirstChannels, Gradients, GroupMoment, Image, Moments, Rows, SampleChannels

Shape = tuple[int, ...]
Shifts = tuple[SampleChannels | None, FirstChannels | None]  # of x and of tx
UNMOVED: Shifts = (None, None)


def row_norm(
    norm: RowNorm, x: Rows, tx: Rows | None, affine: Affine, eps: float, dtype: torch.dtype | None = None
) -> tuple[Rows, Rows | None, *Moments]:
    """A norm of the last dimension with its tangent: y, ty, mean (if the norm takes it off), rstd.

    Layer normalisation (arXiv:1607.06450), root-mean-square normalisation (arXiv:1910.07467) or the adaptive one
    (arXiv:2212.09748), (1 + scale) layer_norm(x) + shift of x (B, N, D) or (B, D) and parameters (B, D) or (B, 1, D).
    """
    kind = NormKind((-1,), norm.centred)
    y, ty, mean, rstd = forward(_full(x), _maybe_full(tx), _broadcast(_scale(norm, affine), _shape(norm, x)), kind, eps)
    moments = (mean.squeeze(-1), rstd.squeeze(-1)) if norm.centred else (rstd.squeeze(-1),)
    return _shaped(y, row_major(x, dtype)), _rows(ty, x, dtype), *moments


def row_norm_backward(
    norm: RowNorm, gy: Rows, gty: Rows | None, x: Rows, tx: Rows | None, affine: Affine, moments: Moments
) -> Gradients:
    """Gradients of `row_norm`'s x, tx and parameters."""
    rstd = moments[-1][..., None]
    mean = moments[0][..., None] if norm.centred else torch.zeros_like(rstd)
    kind, given = NormKind((-1,), norm.centred), _scale(norm, affine)
    found = _gradients(gy, gty, x, tx, given, _shape(norm, x), kind, mean, rstd)
    return *found[:2], *map(_rows, found[2:], affine)


def group_norm(
    x: Image,
    tx: Image | None,
    groups: int,
    affine: Affine,
    eps: float,
    act: str | None = None,
    dtype: torch.dtype | None = None,
    shifts: Shifts = UNMOVED,
) -> tuple[Image, Image | None, GroupMoment, GroupMoment]:
    """Group normalisation (arXiv:1803.08494) with its tangent, SiLU behind it if act is "silu": y, ty, mean, rstd.

    Shifts, of x and of tx, are added to each channel of each sample first. The outputs keep x's memory format.
    """
    broadcast, kind = _broadcast(affine, _one_a_channel(x, groups)), _group_kind(x, act)
    tangent = None if tx is None else _grouped(_moved(tx, shifts[1]), groups)
    y, ty, mean, rstd = forward(_grouped(_moved(x, shifts[0]), groups), tangent, broadcast, kind, eps)
    return _shaped(y, images_like(x, dtype)), _images(ty, x, dtype), mean.flatten(1), rstd.flatten(1)


def group_norm_backward(
    gy: Image,
    gty: Image | None,
    x: Image,
    tx: Image | None,
    groups: int,
    affine: Affine,
    moments: Moments,
    act: str | None = None,
    shifts: Shifts = UNMOVED,
) -> Gradients:
    """Gradients of `group_norm`'s x, tx, parameters and shifts."""
    moved = _moved(x, shifts[0]), None if tx is None else _moved(tx, shifts[1])
    gty_grouped, tx_grouped = (None if a is None else _grouped(a, groups) for a in (gty, moved[1]))
    given = _grouped(gy, groups), gty_grouped, _grouped(moved[0], groups), tx_grouped
    mean, rstd = (moment[(..., *[None] * (x.dim() - 1))] for moment in moments)
    dx, dtx, *rest = _gradients(*given, affine, _one_a_channel(x, groups), _group_kind(x, act), mean, rstd)
    sums = (summed_over_pixels(d, s) for d, s in zip((dx, dtx), shifts, strict=True))
    return (_images(dx, x), _images(dtx, x), *rest, *sums)


def summed_over_pixels(gradient: Tensor | None, shift: Tensor | None) -> Tensor | None:
    """The gradient of a shift of each channel of each sample, from that of the images (B, C or groups of C, ...)."""
    if gradient is None or shift is None:
        return None
    return _full(gradient).reshape(*shift.shape, -1).sum(2).to(shift.dtype)


def _moved(a: Tensor, shift: Tensor | None) -> Tensor:
    return _full(a) if shift is None else _full(a) + over_pixels(_full(shift), a)


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


def _scale(norm: RowNorm, affine: Affine) -> Affine:
    """The parameters as factors and summands."""
    if not norm.modulated or affine.weight is None:
        return affine
    return affine._replace(weight=1 + _full(affine.weight))


def _broadcast(affine: Affine, shape: Shape) -> Affine:
    """The parameters in full precision, in a shape that broadcasts to x's."""
    return Affine(*[None if p is None else _full(p).reshape(shape) for p in affine])


def _gradients(
    gy: Tensor,
    gty: Tensor | None,
    x: Tensor,
    tx: Tensor | None,
    affine: Affine,
    shape: Shape,
    kind: NormKind,
    mean: Tensor,
    rstd: Tensor,
) -> Gradients:
    """The gradients of x, tx and the parameters, each like its own; the parameters broadcast as `shape`."""
    tensors = (_full(gy), _maybe_full(gty), _full(x), _maybe_full(tx))
    found = backward(*tensors, _broadcast(affine, shape), kind, mean, rstd)
    return tuple(map(_rows, found, (x, tx, *affine)))


def _shape(norm: RowNorm, x: Tensor) -> Shape:
    """Return the shape in which parameters broadcast: one row for all, or one per sample."""
    return (x.shape[0], *[1] * (x.dim() - 2), x.shape[-1]) if norm.modulated else x.shape[-1:]


def _one_a_channel(x: Tensor, groups: int) -> Shape:
    return (1, groups, x.shape[1] // groups, *[1] * (x.dim() - 2))


def _grouped(a: Tensor, groups: int) -> Tensor:
    """(B, C, ...) seen as (B, G, C / G, ...)."""
    return a.unflatten(1, (groups, -1))


def _group_kind(x: Tensor, act: str | None) -> NormKind:
    if act not in (None, "silu"):
        raise ValueError(f"act is {act!r}, expected None or 'silu'")
    return NormKind(tuple(range(2, x.dim() + 1)), silu=act == "silu")
