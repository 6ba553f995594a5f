"""A function in double precision, whatever formats it names itself: the reference of its derivatives."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from fullstride.jvp.implementation import only_plain

LOWER = (torch.float32, torch.float16, torch.bfloat16)
CASTS = (Tensor.float, Tensor.half, Tensor.bfloat16)
# Attributes that are read more often than anything is computed, and are equal in every format.
SAME = frozenset(getattr(Tensor, name).__get__ for name in ("shape", "ndim", "device", "is_cuda", "requires_grad"))
DTYPE: Any = Tensor.dtype


def to_float64(x: Any) -> Any:
    """A tensor of lower precision in fp64; the name of a lower format as that of fp64; anything else as it is."""
    if isinstance(x, Tensor):
        return x.double() if x.dtype in LOWER else x
    return torch.float64 if isinstance(x, torch.dtype) and x in LOWER else x


class InFloat64(TorchFunctionMode):
    """Mode that runs every call in fp64: its tensors, the formats that it names, and casts to lower ones."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Run one call."""
        if func in SAME:
            return func(*args)
        if func == DTYPE.__get__:
            return to_float64(func(*args))
        func = Tensor.double if func in CASTS else func
        args, named = pytree.tree_map(to_float64, args), pytree.tree_map(to_float64, kwargs or {})
        return func(*args, **named)


class CoarsestFormat(TorchFunctionMode):
    """Mode that notes the coarsest floating format that any call returns."""

    def __init__(self) -> None:
        """Nothing is noted yet."""
        super().__init__()
        self.coarsest = torch.float64

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Run one call."""
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            self.note(x)
        return out

    def note(self, x: Any) -> None:
        """Note one tensor's format."""
        if isinstance(x, Tensor) and x.dtype in LOWER and torch.finfo(x.dtype).eps > torch.finfo(self.coarsest).eps:
            self.coarsest = x.dtype


@contextmanager
def _default_double() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def in_float64(fn: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """`fn` on fp64 copies of its arguments, and a module's of its parameters and buffers, in plain operations."""
    state: dict[str, Tensor] = {}
    if isinstance(fn, nn.Module):
        state = {name: to_float64(x.detach().to(device)) for name, x in (*fn.named_parameters(), *fn.named_buffers())}

    def run(*args: Any) -> Any:
        with torch.autocast(device.type, enabled=False), only_plain(), _default_double(), InFloat64():
            if not isinstance(fn, nn.Module):
                return fn(*args)
            return functional_call(fn, {name: x.clone() for name, x in state.items()}, args)

    return run


def on_copies(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` as it is, but a module's buffers (running means) are copies."""
    if not isinstance(fn, nn.Module):
        return fn
    return lambda *args: functional_call(fn, {name: x.clone() for name, x in fn.named_buffers()}, args)
