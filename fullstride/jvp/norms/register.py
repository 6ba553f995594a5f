"""The operators of the norms on pairs, each by plain operations or by kernels."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fullstride.jvp.dual_op import PairOp, Tensors
from fullstride.jvp.norms import naive
from fullstride.jvp.norms.layout import images_like, row_major
from fullstride.jvp.registration import register

ROWS = (("eps", "float"), ("dtype", "ScalarType?"), ("implementation", "str"))
GROUPS = (("groups", "int"), ("eps", "float"), ("act", "str"), ("dtype", "ScalarType?"), ("implementation", "str"))


def _rows(implementation: str) -> ModuleType:
    if implementation == "plain":
        return naive
    from fullstride.jvp.norms import rows  # Triton is a GPU's

    return rows


def _groups(implementation: str) -> ModuleType:
    if implementation == "plain":
        return naive
    from fullstride.jvp.norms import group_norm  # Triton is a GPU's

    return group_norm


def _row_gradient(x: Tensor, of: Tensor) -> Tensor:
    return row_major(of)


def _row_op(name: str, parameters: tuple[str, ...], statistics: int, shared: bool) -> PairOp:
    """An op whose plain and fused functions are `name` and `name_backward`, on (x, tx, parameters, their tangents)."""
    count = 1 + len(parameters)

    def forward(*args: Any) -> Tensors:
        (x, *p), (tx, *tp), (eps, dtype, implementation) = args[:count], args[count : 2 * count], args[2 * count :]
        return getattr(_rows(implementation), name)(x, tx, *p, *tp, eps, dtype)

    def backward(gy: Tensor, gty: Tensor | None, *args: Any) -> Tensors:
        (x, *p), (tx, *tp), rest = args[:count], args[count : 2 * count], args[2 * count :]
        moments, implementation = rest[2 : 2 + statistics], rest[-1]
        run = getattr(_rows(implementation), f"{name}_backward")
        return _primals_first(run(gy, gty, x, tx, *p, *tp, *moments))

    def shapes(x: Tensor, *args: Any) -> Tensors:
        tangents = args[count - 1 : 2 * count - 1]
        return _with_statistics(row_major(x, args[-2]), tangents, x.shape[:-1], statistics, _full(x))

    tangents = tuple(f"t{name}" for name in ("x", *parameters))
    alone = tuple(f"{t}{name}" for name in parameters for t in ("", "t")) if shared else ()
    return _registered(
        name, ("x", *parameters), tangents, ROWS, statistics, forward, backward, shapes, alone, _row_gradient
    )


def _registered(
    name: str,
    primals: tuple[str, ...],
    tangents: tuple[str, ...],
    settings: tuple[tuple[str, str], ...],
    rows: int,
    forward: Callable[..., Tensors],
    backward: Callable[..., Tensors],
    shapes: Callable[..., Tensors],
    shared: tuple[str, ...],
    gradient_like: Callable[[Tensor, Tensor], Tensor],
) -> PairOp:
    return register(
        PairOp(
            name,
            primals,
            tangents,
            settings,
            rows,
            forward,
            backward,
            shapes,
            keeps_output=False,
            shared=shared,
            gradient_like=gradient_like,
        )
    )


def _primals_first(gradients: Tensors) -> Tensors:
    """(x, tx, parameters, their tangents) in the operator's order: (x, parameters, tx, tangents)."""
    dx, dtx, *rest = gradients
    half = len(rest) // 2
    return dx, *rest[:half], dtx, *rest[half:]


def _with_statistics(
    y: Tensor, tangents: tuple[Any, ...], rows: tuple[int, ...], statistics: int, full: torch.dtype
) -> Tensors:
    ty = None if all(t is None for t in tangents) else torch.empty_like(y)
    return y, ty, *(y.new_empty(rows, dtype=full) for _ in range(statistics))


def _full(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


LAYER_NORM = _row_op("layer_norm", ("weight", "bias"), 2, shared=True)
RMS_NORM = _row_op("rms_norm", ("weight",), 1, shared=True)
ADA_LAYER_NORM = _row_op("ada_layer_norm", ("scale", "shift"), 2, shared=False)


def _group_forward(x, weight, bias, tx, tweight, tbias, groups, eps, act, dtype, implementation) -> Tensors:
    run = _groups(implementation).group_norm
    return run(x, tx, groups, weight, bias, tweight, tbias, eps, act or None, dtype)


def _group_backward(
    gy, gty, x, weight, bias, tx, tweight, tbias, _, __, mean, rstd, groups, eps, act, _dtype, implementation
) -> Tensors:
    run = _groups(implementation).group_norm_backward
    return _primals_first(run(gy, gty, x, tx, groups, weight, bias, tweight, tbias, mean, rstd, act or None))


def _group_shapes(x, weight, bias, tx, tweight, tbias, groups, *settings) -> Tensors:
    y = images_like(x, settings[-2])
    y, ty, *moments = _with_statistics(y, (tx, tweight, tbias), (x.shape[0], groups), 2, _full(x))
    if ty is not None and tx is not None and tx.shape[0] != x.shape[0]:
        ty = images_like(x[: tx.shape[0]], settings[-2])  # that of the first samples
    return y, ty, *moments


def _group_gradient(x: Tensor, of: Tensor) -> Tensor:
    return images_like(x) if of.ndim > 1 else row_major(of)


PARAMETERS = ("weight", "bias", "tweight", "tbias")
GROUP_NORM = _registered(
    "group_norm",
    ("x", "weight", "bias"),
    ("tx", "tweight", "tbias"),
    GROUPS,
    2,
    _group_forward,
    _group_backward,
    _group_shapes,
    PARAMETERS,
    _group_gradient,
)
