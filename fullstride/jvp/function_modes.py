"""Modes that spare eager forward AD needless work: a graph of the tangent, and shape inference of zero tangents."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._functorch import get_interpreter_stack
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

from fullstride.jvp.dual import is_expanded
from fullstride.jvp.reroute import HANDLED, RerouteFunctional, handled
from fullstride.jvp.state import OwnMode, refuse_checkpoint
from fullstride.jvp.tangent_rules import RULES, VIEWS

# With a plain tensor next to a dual one, these infer the missing tangent's shape through Python, which costs host time
# that an explicit zero does not.
MIXING = {
    F.linear,
    F.conv1d,
    F.conv2d,
    F.conv3d,
    torch.add,
    torch.sub,
    torch.mul,
    torch.div,
    Tensor.add,
    Tensor.sub,
    Tensor.mul,
    Tensor.div,
    Tensor.__add__,
    Tensor.__radd__,
    Tensor.__sub__,
    Tensor.__mul__,
    Tensor.__rmul__,
    Tensor.__truediv__,
}


GETTER = type(Tensor.shape.__get__)  # pyright: ignore[reportAttributeAccessIssue]
_MAKE_DUAL = torch._VF._make_dual  # pyright: ignore[reportAttributeAccessIssue]


def _tangent(x: object) -> Tensor | None:
    # Inside a transform of torch.func the tangents are out of sight; what leaves it is seen again.
    if not isinstance(x, Tensor) or get_interpreter_stack():
        return None
    return forward_ad.unpack_dual(x, level=0).tangent


class ExplicitZeros(RerouteFunctional):
    """Mode that routes calls, and gives vectors that meet a dual tensor (biases, scales) a tangent of zeros."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Run one call."""
        if func in MIXING and any(_tangent(x) is not None for x in args):
            args = tuple(map(_with_zeros, args))
            kwargs = {key: _with_zeros(x) for key, x in (kwargs or {}).items()}
        return super().__torch_function__(func, types, args, kwargs)


def _with_zeros(x: Any) -> Any:
    if not isinstance(x, Tensor) or x.ndim != 1 or not x.is_floating_point() or is_expanded(x):
        return x
    if _tangent(x) is None:
        return forward_ad.make_dual(x, torch.zeros_like(x), level=0)
    return x


# Other cheap functions of their arguments alone, whose primals and tangents are computed apart from each other:
# methods, functions and operators of these names.
PURE = frozenset({
    "add", "radd", "sub", "rsub", "mul", "rmul", "multiply", "div", "true_divide", "truediv",
    "rtruediv", "pow", "square", "sqrt", "rsqrt", "reciprocal", "exp", "exp2", "expm1", "log",
    "log2", "log1p", "sin", "cos", "tanh", "sigmoid", "relu", "relu6", "silu", "gelu",
    "elu", "selu", "celu", "mish", "softplus", "hardtanh", "hardswish", "hardsigmoid", "leaky_relu", "logsigmoid",
    "softsign", "tanhshrink", "erf", "abs", "clamp", "maximum", "minimum", "where", "softmax", "log_softmax",
    "pad", "upsample", "type", "avg_pool1d", "avg_pool2d", "avg_pool3d",
})  # fmt: skip


class DetachedTangents(OwnMode):
    """Mode that keeps each tangent out of the autograd graph, so that nothing is saved for its backward pass.

    PyTorch's formulas of the tangents are ordinary operations that are recorded (pytorch#151782). Cut at every call,
    their graph never outlives the call; what remains saved is what the primal's backward pass needs. A dual tensor
    that is saved would keep its tangent, too, until the dual level ends: the commonest functions therefore have rules
    (`tangent_rules`), and what else is cheap is computed twice, on primals that know of no tangent, and without a graph
    for the tangent.
    """

    def __init__(self, apart: bool = True):
        """Make the mode; `apart` False computes no primal apart from its tangent."""
        super().__init__()
        self._computes_apart = apart

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Run one call."""
        kwargs = kwargs or {}
        if func in VIEWS or type(func) is GETTER or get_interpreter_stack():
            return func(*args, **kwargs)
        if self._computes_apart:
            rule = RULES.get(func)
            if rule is not None and (found := rule(func, *args, **kwargs)) is not None:
                return found
            if _is_pure(func, args, kwargs) and (found := _apart(func, args, kwargs)) is not None:
                return found
        out = func(*args, **kwargs)
        if func is _MAKE_DUAL:  # the tangent is the caller's own tensor
            return out
        if type(out) in (tuple, list):
            return type(out)(map(_cut, out))
        return _cut(out)


class RoutedDetachedTangents(DetachedTangents):
    """Mode that also sends functional calls that carry a tangent to the ops of this package."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Run one call."""
        refuse_checkpoint()
        if func in HANDLED:
            with DetachedTangents(self._computes_apart):
                return handled(func, args, kwargs or {})
        return super().__torch_function__(func, types, args, kwargs)


def _is_pure(func: Any, args: tuple, kwargs: dict) -> bool:
    if not torch.is_grad_enabled():  # nothing is saved
        return False
    name = getattr(func, "__name__", "")
    name = name[2:-2] if name.startswith("__") else name  # mul_ is in place
    return name in PURE and "out" not in kwargs and not kwargs.get("inplace") and not any(x is True for x in args)


def _apart(func: Any, args: tuple, kwargs: dict) -> Tensor | None:
    """Return the dual of a call, with its primal computed from primals; None without a tangent, or for a view's."""
    if all(_tangent(x) is None for x in pytree.tree_leaves((args, kwargs))):
        return None
    with torch.no_grad():
        tangent = _tangent(out := func(*args, **kwargs))
    if tangent is None or out._is_view() or any(out is x for x in args):
        return None
    args, kwargs = pytree.tree_map_only(Tensor, lambda x: torch.ops.aten._fw_primal(x, 0), (args, kwargs))
    return forward_ad.make_dual(func(*args, **kwargs), tangent, level=0)


def _cut(x: Any) -> Any:
    tangent = _tangent(x)
    if tangent is None or not tangent.requires_grad:
        return x
    if not tangent._is_view() and not tangent.is_leaf:
        tangent.detach_()
        return x
    return forward_ad.make_dual(torch.ops.aten._fw_primal(x, 0), tangent.detach(), level=0)
