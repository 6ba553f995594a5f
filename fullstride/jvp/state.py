"""Settings of the running `jvp` for the ops and layers inside it."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

# Read when an op is called, also by the compiler, which guards on them.
_tangent_grad = True
_gradient_inside: bool | None = None
_routing = False

_top_hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks  # pyright: ignore[reportAttributeAccessIssue]


_NOTHING = nullcontext()


class OwnMode(TorchFunctionMode):
    """A mode of this package, which ignores the operations inside the package's own ops."""


def without_own_modes() -> AbstractContextManager[Any]:
    """Disable this package's modes for the calls of an op, unless a mode of the user sees them, too."""
    if torch.compiler.is_compiling() or torch._C._is_torch_function_all_disabled():
        return _NOTHING
    modes = range(torch._C._len_torch_function_stack())
    if modes and all(isinstance(torch._C._get_function_stack_at(i), OwnMode) for i in modes):
        return torch._C.DisableTorchFunction()
    return _NOTHING


class GradientInside(Exception):  # noqa: N818, as it is no failure
    """A gradient is taken whose own tangent may be needed: primals must carry their tangents there."""


def tangent_grad() -> bool:
    """Return whether gradients may be needed through the current tangents; always True outside of `jvp`."""
    return _tangent_grad


def computes_apart() -> bool:
    """Return whether primals may be computed without tangents: not outside of `jvp`, which is what looks for gradients
    that are taken inside of the function and whose tangents would be lost.
    """
    return _gradient_inside is False


def gradient_inside() -> bool:
    """Return whether the function inside `jvp` takes gradients, so that its operations need all their derivatives."""
    return _gradient_inside is True


def refuse_checkpoint() -> None:
    """Raise inside `torch.utils.checkpoint` and `jvp`: its hooks are on what autograd saves."""
    hooks = _top_hooks(True)
    if hooks is not None and _gradient_inside is not None and hooks[0].__module__ == "torch.utils.checkpoint":
        raise RuntimeError(
            "torch.utils.checkpoint inside jvp: its second forward pass has no tangents and saves other tensors than "
            "the first; use fullstride.jvp.checkpoint(module, *args) instead, or none (for a transformers model, call "
            "gradient_checkpointing_disable())"
        )


@contextmanager
def computing(gradients: bool, inside: bool) -> Iterator[None]:
    """Set whether gradients of tangents may be needed, and whether the function takes gradients itself."""
    global _tangent_grad, _gradient_inside
    before, was_inside = _tangent_grad, _gradient_inside
    _tangent_grad = gradients
    _gradient_inside = inside
    try:
        yield
    finally:
        _tangent_grad = before
        _gradient_inside = was_inside


@contextmanager
def routing() -> Iterator[bool]:
    """Yield whether calls are routed from here on, and were not before."""
    global _routing
    before, _routing = _routing, True
    try:
        yield not before
    finally:
        _routing = before
