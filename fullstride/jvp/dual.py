"""Duals: a primal and its tangent, and how an op takes them apart."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import TransformType, get_interpreter_stack, get_unwrapped, is_gradtrackingtensor
from torch._functorch import eager_transforms
from torch.autograd import forward_ad
from torch.nn.attention.bias import CausalBias

from fullstride.jvp.state import without_own_modes

# As `forward_ad` calls them, which first looks for a mode of torch.export at each call, and makes named tuples, which
# a compiler traces step by step.
_unpack_dual: Any = torch._VF._unpack_dual  # pyright: ignore[reportAttributeAccessIssue]
_make_dual: Any = torch._VF._make_dual  # pyright: ignore[reportAttributeAccessIssue]
_level_is_outermost = False


@contextmanager
def outermost_level() -> Iterator[None]:
    """A dual level outside of all transforms of torch.func: those that are met in it are inside the derivative."""
    global _level_is_outermost
    _level_is_outermost = True
    try:
        with forward_ad.dual_level():
            yield
    finally:
        _level_is_outermost = False


class Dual(NamedTuple):
    """A tensor and its tangent, of the same shape; None for a constant."""

    primal: Tensor
    tangent: Tensor | None


def unpack(x: Tensor) -> Dual:
    """x as a primal and a tangent, under `torch.func.jvp`, `forward_ad.dual_level` and while compiling either.

    Raises:
        RuntimeError: under a jvp of a jvp, of a gradient or of a vmap, which ops that unpack would answer wrongly.

    """
    return Dual(*unpack_all(x)[0])


def unpack_all(*tensors: Tensor | None) -> list[tuple[Any, Tensor | None]]:
    """Unpack an op's arguments, any of which may be absent, like `unpack`."""
    if torch.compiler.is_compiling():
        return [_traced(x) for x in tensors]
    with without_own_modes():
        if _inside_jvp(TransformType.Vmap):
            raise RuntimeError(
                "a jvp of a vmap: the ops of fullstride.jvp cannot see its tangents; take vmap outside (vmap of jvp), "
                "or use the op's own batch dimension, or attention with implementation='plain'"
            )
        if forward_ad._current_level < 0:
            return [(x, None) for x in tensors]  # vmap has no rule for unpack_dual
        found = [_unpacked(x) for x in tensors]
        if any(tangent is not None for _, tangent in found):
            refuse_higher_order()
        return found


def _traced(x: Tensor | None) -> tuple[Any, Tensor | None]:
    if x is None:
        return None, None
    # The level is named: left out, the compiler would read the global one at the first op that it meets and take it
    # for all, also for those inside the JVP if that first one was outside.
    primal, tangent = _unpack_dual(x, level=0)
    if tangent is None:
        return x, None
    refuse_higher_order()
    return primal, tangent


def _unpacked(x: Any) -> tuple[Any, Tensor | None]:
    if not isinstance(x, Tensor):  # absent, or what the op refuses
        return x, None
    primal, tangent = _unpack_dual(x, level=0)
    if tangent is None:
        return x, None
    return primal, None if tangent._is_zerotensor() else tangent


def constant(x: Tensor) -> Tensor:
    """Return the values of a tensor or dual, for updates of running statistics, also inside `torch.func.jvp`."""
    primal = x.detach() if inside_transform() else unpack(x).primal.detach()
    while not torch.compiler.is_compiling() and is_gradtrackingtensor(primal):
        primal = get_unwrapped(primal)
    return primal


def pack(primal: Tensor, tangent: Tensor | None) -> Tensor:
    """Return the dual tensor of a primal and a tangent; the primal itself if there is no tangent."""
    if tangent is None:
        return primal
    with without_own_modes():
        return _make_dual(primal, tangent, level=0)


def is_expanded(x: Tensor) -> bool:
    """Return whether elements of x share memory (an expanded tensor): PyTorch gives such a tensor no tangent."""
    return any(size > 1 and stride == 0 for size, stride in zip(x.shape, x.stride(), strict=True))


def check_pair(primal: Any, tangent: Any) -> None:
    """Raise unless a tangent is absent, or of its primal's shape, format and device."""
    if tangent is None:
        return
    if not isinstance(primal, Tensor) or not isinstance(tangent, Tensor):
        kinds = f"{type(primal).__name__} and {type(tangent).__name__}"
        raise ValueError(f"a primal and its tangent are {kinds}, expected tensors; pass None as a constant's tangent")
    if primal.is_nested:
        raise ValueError(
            "a primal is a nested tensor, which has no tangent in PyTorch; expected its values(), of which fn makes a "
            "nested tensor (torch.nested.nested_tensor_from_jagged)"
        )
    if primal.dtype != tangent.dtype or primal.shape != tangent.shape or primal.device != tangent.device:
        described = [f"{x.dtype} {tuple(x.shape)} on {x.device}" for x in (primal, tangent)]
        raise ValueError(f"a tangent is {described[1]}, expected {described[0]} like its primal")
    if not primal.is_floating_point():
        raise ValueError(f"a primal with a tangent is {primal.dtype}, expected a floating dtype; pass None as tangent")


def moves(x: object) -> bool:
    """Return whether x is a tensor with a tangent, or may be one inside a transform that hides tangents."""
    if not isinstance(x, Tensor) or isinstance(x, CausalBias):
        return False
    if inside_transform():
        return True
    if not torch.compiler.is_compiling() and forward_ad._current_level < 0:
        return False
    _, tangent = _unpack_dual(x, level=0)
    if torch.compiler.is_compiling():
        return tangent is not None
    return tangent is not None and not tangent._is_zerotensor()


def inside_transform() -> bool:
    """Return whether a gradient or vmap of torch.func inside the derivative hides its tangents from the ops."""
    if torch.compiler.is_compiling():
        return False
    return _inside_jvp(TransformType.Grad) or _inside_jvp(TransformType.Vmap)


def may_require_grad(*tensors: Tensor) -> bool:
    """Return whether any of them may need a gradient; inside transforms of torch.func `requires_grad` may hide it."""
    inside = eager_transforms.JVP_NESTING > 0 or (not torch.compiler.is_compiling() and get_interpreter_stack())
    return bool(inside) or any(x.requires_grad for x in tensors)


def refuse_higher_order() -> None:
    """Raise if a tangent of a tangent, or of a gradient, is computed."""
    if eager_transforms.JVP_NESTING > 1:
        raise RuntimeError(
            "a jvp inside a jvp: the ops of fullstride.jvp have only a first forward derivative; expected a single jvp "
            "around them. For higher orders use PyTorch operations (torch.nn.functional) in the model, or "
            "attention with implementation='plain', which has derivatives of any order"
        )
    refuse_gradient_inside_jvp()


def refuse_gradient_inside_jvp() -> None:
    """Raise under a jvp of a gradient, which sees the primals only."""
    if not torch.compiler.is_compiling() and _inside_jvp(TransformType.Grad):
        raise RuntimeError(
            "a jvp of a gradient (torch.func.grad or vjp inside jvp): the ops of fullstride.jvp have no derivative of "
            "their backward pass; take the gradient outside (grad of jvp), or use PyTorch operations in the model, or "
            "attention with implementation='plain', which has derivatives of any order"
        )


def _inside_jvp(transform: object) -> bool:
    kinds = [level.key() for level in get_interpreter_stack() or []]
    if _level_is_outermost:
        return transform in kinds
    return TransformType.Jvp in kinds and transform in kinds[kinds.index(TransformType.Jvp) :]
