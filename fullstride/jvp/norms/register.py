"""Operators of the norms on primals and tangents, each in PyTorch operations or as kernels."""

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fullstride.jvp.dual_op import DualOp, Tensors
from fullstride.jvp.norms import naive
from fullstride.jvp.norms.closed_form import ROW_NORMS, Affine
from fullstride.jvp.norms.layout import images_like, row_major
from fullstride.jvp.registration import register

SETTINGS = (("dtype", "ScalarType?"), ("implementation", "str"))


def _rows(implementation: str) -> ModuleType:
    if implementation == "plain":
        return naive
    from fullstride.jvp.norms import rows  # only GPUs have Triton

    return rows


def _groups(implementation: str) -> ModuleType:
    if implementation == "plain":
        return naive
    from fullstride.jvp.norms import group_norm  # only GPUs have Triton

    return group_norm


def _row_op(name: str, *parameters: str) -> DualOp:
    norm = ROW_NORMS[name]
    statistics = 2 if norm.centred else 1

    def forward(primals: Tensors, tangents: Tensors, settings: Sequence[Any]) -> Tensors:
        eps, dtype, implementation = settings
        return _rows(implementation).row_norm(norm, *_taken(primals, tangents), eps, dtype)

    def backward(gy: Tensor, gty: Any, primals: Tensors, tangents: Tensors, saved: Tensors, settings: Any) -> Tensors:
        run = _rows(settings[-1]).row_norm_backward
        return _primals_first(run(norm, gy, gty, *_taken(primals, tangents), saved[2:]), len(parameters))

    def shapes(primals: Any, tangents: Tensors, settings: Sequence[Any]) -> Tensors:
        x, (_, dtype, _) = primals[0], settings
        return _with_statistics(row_major(x, dtype), tangents, x.shape[:-1], statistics, x)

    of_all = tuple(name for parameter in parameters for name in (parameter, f"t{parameter}"))
    return register(
        DualOp(
            name=name,
            primals=("x", *parameters),
            tangents=tuple(f"t{name}" for name in ("x", *parameters)),
            settings=(("eps", "float"), *SETTINGS),
            rows=statistics,
            forward=forward,
            backward=backward,
            shapes=shapes,
            keeps_output=False,
            shared=() if norm.modulated else of_all,
            gradient_like=lambda x, of: row_major(of),
        )
    )


def _taken(primals: Any, tangents: Any) -> tuple[Any, Tensor | None, Affine]:
    """The tensor, its tangent, and the parameters, of which the last may not be there."""
    (x, weight, bias), (tx, tweight, tbias) = (*primals, None)[:3], (*tangents, None)[:3]
    return x, tx, Affine(weight, bias, tweight, tbias)


def _primals_first(gradients: Tensors, parameters: int) -> Tensors:
    """The gradients of (x, tx, weight, bias, tweight, tbias) in the operator's order."""
    dx, dtx, *rest = gradients
    return dx, *rest[:parameters], dtx, *rest[2 : 2 + parameters]


def _with_statistics(y: Tensor, tangents: Tensors, rows: tuple[int, ...], statistics: int, x: Tensor) -> Tensors:
    ty = None if all(t is None for t in tangents) else torch.empty_like(y)
    full = torch.promote_types(x.dtype, torch.float32)
    return y, ty, *(y.new_empty(rows, dtype=full) for _ in range(statistics))


LAYER_NORM = _row_op("layer_norm", "weight", "bias")
RMS_NORM = _row_op("rms_norm", "weight")
ADA_LAYER_NORM = _row_op("ada_layer_norm", "scale", "shift")


def _group_forward(primals: Tensors, tangents: Tensors, settings: Sequence[Any]) -> Tensors:
    groups, eps, act, dtype, implementation = settings
    x, tx, affine, shifts = _images_taken(primals, tangents)
    return _groups(implementation).group_norm(x, tx, groups, affine, eps, act or None, dtype, shifts=shifts)


def _group_backward(
    gy: Tensor, gty: Tensor | None, primals: Tensors, tangents: Tensors, saved: Tensors, settings: Sequence[Any]
) -> Tensors:
    groups, _, act, _, implementation = settings
    x, tx, affine, shifts = _images_taken(primals, tangents)
    run = _groups(implementation).group_norm_backward
    found = run(gy, gty, x, tx, groups, affine, saved[2:], act or None, shifts=shifts)
    dx, dtx, weight, bias, tweight, tbias, shift, tshift = found
    return dx, shift, weight, bias, None if tangents[0] is None else dtx, tshift, tweight, tbias


def _images_taken(primals: Any, tangents: Any) -> tuple[Tensor, Tensor | None, Affine, tuple[Any, Any]]:
    """The images, their tangent, the parameters, and the shifts of both."""
    (x, shift, weight, bias), (tx, tshift, tweight, tbias) = primals, tangents
    if tx is None and tshift is not None:
        tx = torch.zeros_like(x)
    return x, tx, Affine(weight, bias, tweight, tbias), (shift, tshift)


def _group_shapes(primals: Any, tangents: Tensors, settings: Sequence[Any]) -> Tensors:
    (x, *_), (groups, _, _, dtype, _) = primals, settings
    y, ty, *moments = _with_statistics(images_like(x, dtype), tangents, (x.shape[0], groups), 2, x)
    if (tx := tangents[0]) is not None and tx.shape[0] != x.shape[0]:
        ty = images_like(x[: tx.shape[0]], dtype)  # that of the first samples
    return y, ty, *moments


GROUP_NORM = register(
    DualOp(
        name="group_norm",
        primals=("x", "shift", "weight", "bias"),
        tangents=("tx", "tshift", "tweight", "tbias"),
        settings=(("groups", "int"), ("eps", "float"), ("act", "str"), *SETTINGS),
        rows=2,
        forward=_group_forward,
        backward=_group_backward,
        shapes=_group_shapes,
        keeps_output=False,
        shared=("weight", "bias", "tweight", "tbias"),
        gradient_like=lambda x, of: images_like(x) if of.ndim > 2 else row_major(of),
    )
)
