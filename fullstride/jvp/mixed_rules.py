"""Rules of torch's functions for a batch in which only the first samples carry a tangent."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fullstride.jvp.mixed_batch import REMEDY, MixedBatch, rule

aten = torch.ops.aten


@rule("add", "__add__", "__radd__")
def add(a: Any, b: Any) -> MixedBatch:
    """Add."""
    moved = [x.tangent for x in (a, b) if isinstance(x, MixedBatch)]
    return _beside(_primal(a) + _primal(b), moved[0] if len(moved) == 1 else moved[0] + moved[1], a, b)


@rule("sub", "__sub__")
def sub(a: Any, b: Any) -> MixedBatch:
    """Subtract."""
    primal = _primal(a) - _primal(b)
    if not isinstance(b, MixedBatch):
        return _beside(primal, a.tangent, a)
    return _beside(primal, a.tangent - b.tangent if isinstance(a, MixedBatch) else -b.tangent, a, b)


@rule("mul", "__mul__", "__rmul__")
def mul(a: Any, b: Any) -> MixedBatch:
    """Multiply."""
    primal = _primal(a) * _primal(b)
    with torch.no_grad():
        pairs = ((x, y) for x, y in ((a, b), (b, a)) if isinstance(x, MixedBatch))
        moved = [x.tangent * _head(y, len(x.tangent), primal) for x, y in pairs]
        return _beside(primal, moved[0] if len(moved) == 1 else moved[0] + moved[1], a, b)


@rule("div", "__truediv__")
def div(a: Any, b: Any) -> MixedBatch:
    """Divide."""
    primal = _primal(a) / _primal(b)
    n = len((a if isinstance(a, MixedBatch) else b).tangent)
    with torch.no_grad():
        divisor = _head(b, n, primal)
        moved = [a.tangent / divisor] if isinstance(a, MixedBatch) else []
        if isinstance(b, MixedBatch):
            b.check_front()
            moved.append(-_head(a, n, primal) / divisor.square() * b.tangent)
        return _beside(primal, moved[0] if len(moved) == 1 else moved[0] + moved[1], a, b)


@rule("neg", "__neg__")
def neg(x: MixedBatch) -> MixedBatch:
    """Negate."""
    return MixedBatch(-x.primal, -x.tangent)


@rule("sin")
def sin(x: MixedBatch) -> MixedBatch:
    """Apply to each element."""
    with torch.no_grad():
        tangent = x.tangent * x.head.cos()
    return MixedBatch(x.primal.sin(), tangent)


@rule("cos")
def cos(x: MixedBatch) -> MixedBatch:
    """Apply to each element."""
    with torch.no_grad():
        tangent = -x.tangent * x.head.sin()
    return MixedBatch(x.primal.cos(), tangent)


# A Jacobian that is diagonal is its own transpose: backward formulas, one kernel each, push tangents forward.


@rule("silu")
def silu(input: MixedBatch, inplace: bool = False) -> MixedBatch:  # noqa: A002
    """Apply SiLU to each element; never in place."""
    with torch.no_grad():
        tangent = aten.silu_backward(input.tangent, input.head)
    return MixedBatch(F.silu(input.primal), tangent)


@rule("gelu")
def gelu(input: MixedBatch, approximate: str = "none") -> MixedBatch:  # noqa: A002
    """Apply to each element."""
    with torch.no_grad():
        tangent = aten.gelu_backward(input.tangent, input.head, approximate=approximate)
    return MixedBatch(F.gelu(input.primal, approximate=approximate), tangent)


@rule("dropout")
def dropout(input: MixedBatch, p: float = 0.5, training: bool = True, inplace: bool = False) -> MixedBatch:  # noqa: A002
    """Apply the same mask to a sample and its tangent; never in place."""
    if not training or p == 0:
        return input
    input.check_front()
    primal, mask = torch.native_dropout(input.primal, p, True)
    with torch.no_grad():
        scale = 0.0 if p == 1 else 1 / (1 - p)
        return MixedBatch(primal, aten.native_dropout_backward(input.tangent, mask[: len(input.tangent)], scale))


@rule("linear")
def linear(input: MixedBatch, weight: Tensor, bias: Tensor | None = None) -> MixedBatch:  # noqa: A002
    """Apply to primals and tangents; the bias carries no tangent."""
    primal = F.linear(input.primal, weight, bias)
    with torch.no_grad():
        return MixedBatch(primal, F.linear(input.tangent, weight))


@rule("conv2d")
def conv2d(input: MixedBatch, weight: Tensor, bias: Tensor | None = None, *settings: Any, **named: Any) -> MixedBatch:  # noqa: A002
    """Apply to primals and tangents; the bias carries no tangent."""
    primal = F.conv2d(input.primal, weight, bias, *settings, **named)
    with torch.no_grad():
        return MixedBatch(primal, F.conv2d(input.tangent, weight, None, *settings, **named))


@rule("cat")
def cat(tensors: Sequence[Any], dim: int = 0) -> MixedBatch:
    """Concatenate along any dimension but the samples'.

    Raises:
        ValueError: along the samples'.

    """
    some = next(x for x in tensors if isinstance(x, MixedBatch))
    if dim % some.primal.ndim in (0, some.samples):
        raise ValueError(f"cat along the samples of a batch in which only some carry a tangent; {REMEDY}")
    primal = torch.cat([_primal(x) for x in tensors], dim)
    n = len(some.tangent)
    moved = [x.tangent if isinstance(x, MixedBatch) else torch.zeros_like(x[:n]) for x in tensors]
    return MixedBatch(primal, torch.cat(moved, dim))


def _primal(x: Any) -> Any:
    return x.primal if isinstance(x, MixedBatch) else x


def _head(x: Any, n: int, like: Tensor) -> Any:
    """Return the part of an operand, broadcast with `like`, that meets the first n samples."""
    if isinstance(x, MixedBatch):
        return x.head
    return x[:n] if isinstance(x, Tensor) and x.ndim == like.ndim and len(x) == len(like) else x


def _beside(primal: Tensor, tangent: Tensor, *operands: Any) -> MixedBatch:
    """The result of operands that broadcast, with the tangent in its shape and format."""
    for x in operands:
        if isinstance(x, MixedBatch):
            x.check_front()  # else a single tangent would be expanded to all samples
            if x.primal.ndim != primal.ndim:
                raise ValueError(f"an operand puts a dimension in front of the samples; {REMEDY}")
    shape = (len(tangent), *primal.shape[1:])
    return MixedBatch(primal, (tangent if tangent.shape == shape else tangent.expand(shape)).to(primal.dtype))


def _reversed(rule: Any) -> Any:
    return lambda self, other: rule(other, self)


# The compiler calls them in this form if b is a `MixedBatch`.
rule("rsub", "__rsub__")(_reversed(sub))
rule("__rdiv__", "__rtruediv__")(_reversed(div))
for _name, _rule in {"add": add, "sub": sub, "mul": mul, "truediv": div}.items():
    setattr(MixedBatch, f"__{_name}__", _rule)
    setattr(MixedBatch, f"__r{_name}__", _reversed(_rule))
for _name, _rule in {"__neg__": neg, "sin": sin, "cos": cos}.items():
    setattr(MixedBatch, _name, _rule)
