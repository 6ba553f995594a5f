"""Triton kernels compiled by threads: before a pass that launches many of them, or while a graph with them is traced.

A kernel is compiled at its first launch, one after the other, and while Triton's passes run nothing else does: the
norms of a network of many sizes take a minute. What is launched inside `gathered` is compiled on all cores instead, and
not run.
"""

import contextvars
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fullstride.device import cores

# Of the devices that Triton compiles for.
KIND = "cuda"

_lock = threading.Lock()
# The autograd engine hands what a thread keeps here on to the threads of its backward passes, and nobody else.
_GATHERING = "fullstride.gathering"
_compiling: tuple[Any, contextvars.Context] | None = None
_foreseen = set[Hashable]()


@contextmanager
def gathered(device: torch.device) -> Iterator[None]:
    """Compile what this thread launches on a GPU, without running it; the results of such launches are arbitrary.

    Backward passes from here are part of it, although other threads run them. Kernels are there before the next launch
    outside, which waits for them. One that cannot be compiled says so when it is launched.
    """
    if not compiles(device):
        yield
        return
    before = gathering()
    torch._C._stash_obj_in_tls(_GATHERING, True)
    try:
        yield
    finally:
        torch._C._stash_obj_in_tls(_GATHERING, before)


def compiles(device: torch.device) -> bool:
    """Whether kernels for a device can be compiled ahead: Triton does so from 3.5 on, and not where it interprets."""
    return device.type == KIND and _able()


def gathering() -> bool:
    """Whether this thread's launches are to be handed to `compile_soon`."""
    return torch._C._is_key_in_tls(_GATHERING) and torch._C._get_obj_in_tls(_GATHERING)


def compile_soon(kernel: Any, grid: tuple[int, ...], arguments: Sequence[Any], options: dict[str, Any]) -> None:
    """Let a thread compile a kernel for these arguments, unless that was done."""
    global _compiling
    import triton

    with _lock:
        if _compiling is None:
            # The context holds the mode, so that launches outside see nothing of it.
            _compiling = triton.AsyncCompileMode(_threads(), ignore_errors=True), contextvars.copy_context()
            _compiling[1].run(_compiling[0].__enter__)
        _compiling[1].run(kernel.warmup, *map(_stand_in, arguments), grid=grid, **options)


def settle() -> None:
    """Wait for what threads still compile."""
    global _compiling
    if _compiling is None:
        return
    with _lock:
        if _compiling is not None:
            (mode, context), _compiling = _compiling, None
            context.run(mode.__exit__, None, None, None)


def foresee(name: str, run: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Compile the kernels of an operator's call that the compiler traces with fake tensors.

    Args:
        name: of the operator.
        run: the operator, which must take fake tensors.
        args: of the call.

    """
    tensors = [x for x in args if isinstance(x, Tensor)]
    if not all(isinstance(x, FakeTensor) and compiles(x.device) and _fixed(x) for x in tensors):
        return
    call = name, *((x.shape, x.stride(), x.dtype, x.device) if isinstance(x, Tensor) else x for x in args)
    if call not in _foreseen:
        _foreseen.add(call)
        with gathered(tensors[0].device):
            run(*args)


def _fixed(x: Tensor) -> bool:
    """Whether the sizes are numbers: to look at symbols would bind them."""
    return all(type(n) is int for n in (*x.shape, *x.stride()))


@cache
def _able() -> bool:
    try:
        import triton
        from triton import knobs
    except ImportError:
        return False
    return hasattr(triton, "AsyncCompileMode") and not knobs.runtime.interpret


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(cores(), "compile-kernels")


def _stand_in(argument: Any) -> Any:
    """What Triton specialises on as it does on the argument: an aligned tensor of its format."""
    from triton.runtime.jit import MockTensor

    if isinstance(argument, tuple):
        return tuple(map(_stand_in, argument))
    return MockTensor(argument.dtype) if isinstance(argument, Tensor) else argument
