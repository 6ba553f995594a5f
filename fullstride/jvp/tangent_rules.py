"""Tangents of the commonest functions inside eager `jvp`, each with as few operations as the mathematics needs.

PyTorch's own forward AD infers the shape of an absent tangent through Python, multiplies by constants' zero tangents,
and records the tangent's operations. A rule computes the primal from primals, as without a derivative, and the tangent
without a graph. It returns None for arguments that it does not handle; PyTorch's derivative is then used.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# `torch.autograd.forward_ad` looks for a compiler's mode at each call of these; inside eager `jvp` there is none.
_unpack_dual: Any = torch._VF._unpack_dual  # pyright: ignore[reportAttributeAccessIssue]
_make_dual: Any = torch._VF._make_dual  # pyright: ignore[reportAttributeAccessIssue]
_aten: Any = torch.ops.aten
Dual = Tensor | None
Rule = Callable[..., Dual]
_SHAPE = {"stride", "padding", "output_padding", "dilation", "groups"}


def split(x: Any) -> tuple[Any, Any]:
    """The primal and the tangent of an argument; the argument itself and None if it has no tangent."""
    if not isinstance(x, Tensor):
        return x, None
    primal, tangent = _unpack_dual(x, level=0)
    return (primal, tangent) if tangent is not None else (x, None)


def joined(primal: Tensor, tangent: Callable[[], Tensor]) -> Dual:
    """The dual of a primal and of a tangent without a graph; None if autocast gives the two different formats."""
    with torch.no_grad():
        moved = no_view(tangent())
    return _make_dual(primal, moved, level=0) if primal.dtype == moved.dtype else None


def no_view(x: Tensor) -> Tensor:
    """Return x's memory as no view: one that was made without gradients may not be written to with them."""
    return _aten._unsafe_view(x, x.shape) if x._is_view() else x


def _product(func: Any, x: Any = None, weight: Any = None, bias: Any = None, /, *rest: Any, **named: Any) -> Dual:
    """A product or convolution with a constant weight."""
    primal, tangent = split(x)
    if tangent is None or split(weight)[1] is not None or split(bias)[1] is not None or not named.keys() <= _SHAPE:
        return None
    out = func(primal, weight, bias, *rest, **named)
    return joined(out, lambda: func(tangent, weight, None, *rest, **named))


def _sum(func: Any, x: Any = None, y: Any = None, /, *rest: Any, **named: Any) -> Dual:
    """A sum or difference, one side of which may be a constant."""
    (p, tp), (q, tq) = split(x), split(y)
    if rest or named or (tp is None and tq is None):
        return None
    out = func(p, q)
    if tp is not None and tq is not None:
        return joined(out, lambda: func(tp, tq))
    # A copy: each dual has a tangent of its own, because it may be written to.
    moved: Any = tq if tp is None else tp
    sign = -1 if tp is None and func in _DIFFERENCES else 1
    copied = lambda: torch.empty_like(out).copy_(moved)  # noqa: E731
    return joined(out, copied if sign > 0 else lambda: copied().neg_())


def _times(func: Any, x: Any = None, y: Any = None, /, *rest: Any, **named: Any) -> Dual:
    """A product of elements or of matrices."""
    (p, tp), (q, tq) = split(x), split(y)
    if rest or named or (tp is None and tq is None):
        return None
    out = func(p, q)
    if tp is None:
        return joined(out, lambda: func(p, tq))
    if tq is None:
        return joined(out, lambda: func(tp, q))
    return joined(out, lambda: func(tp, q).add_(func(p, tq)))


def _quotient(func: Any, x: Any = None, y: Any = None, /, *rest: Any, **named: Any) -> Dual:
    """A quotient with a constant denominator."""
    p, tp = split(x)
    if rest or named or tp is None or split(y)[1] is not None:
        return None
    out = func(p, y)
    return joined(out, lambda: func(tp, y))


def _elementwise(derivative: Callable[..., Tensor], *known: str) -> Rule:
    """A function of each element: `derivative` of the tangent, the primal, the output and the `known` keywords."""

    def rule(func: Any, x: Any = None, /, *rest: Any, inplace: bool = False, **named: Any) -> Dual:
        primal, tangent = split(x)
        # PyTorch's backward functions conjugate complex derivatives, which a tangent's may not be.
        if tangent is None or rest or inplace or primal.is_complex() or not named.keys() <= {*known}:
            return None
        out = func(primal, **named)
        if out.dtype != primal.dtype:
            return None
        return joined(out, lambda: derivative(tangent, primal, out, **named))

    return rule


def _softmax(func: Any, x: Any = None, /, *rest: Any, **named: Any) -> Dual:
    """Softmax, whose Jacobian is symmetric: its forward derivative is its backward one."""
    primal, tangent = split(x)
    dim = rest[0] if rest else named.get("dim")
    if tangent is None or dim is None or len(rest) > 1 or not named.keys() <= {"dim", "_stacklevel"}:
        return None
    out = func(primal, dim)
    if out.dtype != primal.dtype:
        return None
    return joined(out, lambda: _aten._softmax_backward_data(tangent, out, dim, out.dtype))


def _linear(func: Any, x: Any = None, /, *rest: Any, **named: Any) -> Dual:
    """A linear function of one tensor; where it returns a view, PyTorch's own derivative is a view, too."""
    primal, tangent = split(x)
    if tangent is None or "out" in named:
        return None
    out = func(primal, *rest, **named)
    if out._is_view():
        return func(x, *rest, **named)
    return joined(out, lambda: func(tangent, *rest, **named)) if out.is_floating_point() else None


def _joint(func: Any, tensors: Any = None, /, *rest: Any, **named: Any) -> Dual:
    """Several tensors as one, any of which may be a constant."""
    pairs = [split(x) for x in tensors or ()]
    if "out" in named or all(tangent is None for _, tangent in pairs):
        return None
    out = func([primal for primal, _ in pairs], *rest, **named)
    tangents = lambda: [torch.zeros_like(primal) if tangent is None else tangent for primal, tangent in pairs]  # noqa: E731
    return joined(out, lambda: func(tangents(), *rest, **named))


def _everywhere(*names: str) -> list[Any]:
    """The functions and methods of these names in `torch`, `torch.nn.functional` and `Tensor`."""
    found = [getattr(owner, name, None) for owner in (torch, F, Tensor) for name in names]
    return [f for f in found if callable(f)]  # `torch.float` is a format


def _rules(rule: Rule, functions: Iterable[Any]) -> dict[Any, Rule]:
    return dict.fromkeys(functions, rule)


_DIFFERENCES = frozenset(_everywhere("sub", "subtract", "__sub__"))
RULES: dict[Any, Rule] = {
    **_rules(_product, [F.linear, F.conv1d, F.conv2d, F.conv3d]),
    **_rules(_product, [F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d]),
    **_rules(_sum, [*_everywhere("add", "__add__", "__radd__"), *_DIFFERENCES]),
    **_rules(_times, _everywhere("mul", "multiply", "__mul__", "__rmul__")),
    **_rules(_times, _everywhere("matmul", "mm", "bmm", "mv", "__matmul__", "__rmatmul__")),
    **_rules(_quotient, _everywhere("div", "divide", "true_divide", "__truediv__")),
    **_rules(_elementwise(lambda t, x, y: _aten.silu_backward(t, x)), [F.silu]),
    **_rules(_elementwise(lambda t, x, y, **given: _aten.gelu_backward(t, x, **given), "approximate"), [F.gelu]),
    **_rules(_elementwise(lambda t, x, y: _aten.threshold_backward(t, y, 0)), _everywhere("relu")),
    **_rules(_elementwise(lambda t, x, y: _aten.sigmoid_backward(t, y)), _everywhere("sigmoid")),
    **_rules(_elementwise(lambda t, x, y: _aten.tanh_backward(t, y)), _everywhere("tanh")),
    **_rules(_softmax, _everywhere("softmax")),
    **_rules(_joint, _everywhere("cat", "concat", "concatenate", "stack")),
    **_rules(
        _linear,
        _everywhere(
            "reshape", "reshape_as", "flatten", "contiguous", "clone", "__getitem__", "repeat", "tile", "roll", "flip",
            "sum", "mean", "neg", "__neg__", "to", "float", "double", "half", "bfloat16", "type_as", "interpolate",
        ),
    ),
}  # fmt: skip

# Functions that return views: PyTorch's derivative of a tangent without a graph has none. A result in memory of its own
# has a rule instead, as what is saved of PyTorch's dual keeps its tangent.
VIEWS = frozenset(
    _everywhere(
        "view", "view_as", "permute", "transpose", "swapaxes", "swapdims", "movedim", "moveaxis", "t", "unflatten",
        "squeeze", "unsqueeze", "chunk", "split", "tensor_split", "unbind", "narrow", "select", "expand", "expand_as",
        "broadcast_to",
    )
)  # fmt: skip
