"""Triton kernels compiled on all cores: before a pass that launches many of them, or while a graph with them is traced.

A kernel is compiled at its first launch, one after the other, and while Triton's passes run nothing else does: the
norms of a network of many sizes take a minute. Launches inside `compile_only` are compiled in parallel instead, and
not run: by the compiler's processes if they were started, else by threads of this one.
"""

import contextvars
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fullstride.device import launch_replay
from fullstride.device.select import cores_each
from fullstride.device.triton_worker import compile_kernel, settings
from fullstride.runs.atomic_files import note

# Type of the devices that Triton compiles for.
KIND = "cuda"
# A kernel file that changes after this time differs from the one that this process imported.
IMPORTED = time.time()

_lock = threading.Lock()
# The autograd engine hands what a thread keeps here on to the threads of its backward passes, and nobody else.
_GATHERING = "fullstride.gathering"
_compiling: tuple[Any, contextvars.Context, "_Elsewhere"] | None = None
_processes = False  # whether the compiler's processes were started
_foreseen = set[Hashable]()
_saying = threading.Lock()
_said = False  # whether a failed compilation was reported


@contextmanager
def compile_only(device: torch.device) -> Iterator[None]:
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
    """Return whether kernels for a device can be compiled ahead: this needs Triton 3.5, not its interpreter."""
    return device.type == KIND and _able()


def gathering() -> bool:
    """Return whether this thread's launches go to `compile_soon`."""
    return torch._C._is_key_in_tls(_GATHERING) and torch._C._get_obj_in_tls(_GATHERING)


def start_processes(device: torch.device) -> None:
    """Start the compiler processes of `torch.compile`, for our kernels too, if the device has kernels."""
    global _processes
    if compiles(device):
        from torch._inductor.async_compile import AsyncCompile, get_compile_threads  # a long import

        _processes = get_compile_threads() > 1
        AsyncCompile.use_process_pool()  # starts the processes, if they are enabled


def launch(kernel: Any, grid: tuple[int, ...], arguments: Sequence[Any], options: dict[str, Any]) -> None:
    """Run a kernel on a grid of programs, if there are any; inside `compile_only` only compile it."""
    if not all(grid):
        return
    if gathering():
        launch_replay.note_nothing_launched()
        compile_soon(kernel, grid, arguments, options)
        return
    wait_for_compiles()
    launch_replay.launch(kernel, grid, arguments, options)


def compile_soon(kernel: Any, grid: tuple[int, ...], arguments: Sequence[Any], options: dict[str, Any]) -> None:
    """Let a process or a thread compile a kernel for these arguments, unless that was done."""
    global _compiling
    import triton

    arguments = list(map(_stand_in, arguments))
    with _lock:
        if _compiling is None:
            # The context holds the mode, so that launches outside see nothing of it.
            elsewhere = _Elsewhere()
            mode = triton.AsyncCompileMode(elsewhere, ignore_errors=True)  # pyright: ignore[reportArgumentType]
            _compiling = mode, contextvars.copy_context(), elsewhere
            _compiling[1].run(mode.__enter__)
        _compiling[2].launched = kernel, grid, arguments, options
        _compiling[1].run(kernel.warmup, *arguments, grid=grid, **options)


class _Elsewhere:
    """Triton's executor: submits the work of each kernel that is not compiled yet."""

    launched: tuple[Any, tuple[int, ...], Sequence[Any], dict[str, Any]]

    def submit(self, compile_here: Callable[[], Any]) -> Future:
        """Let a process compile the last launch, if it can, and a thread fetch the result."""
        kernel, *rest = self.launched
        name = kernel.fn.__qualname__
        if not _processes:
            return _threads().submit(_reporting, name, compile_here)
        from triton.runtime import driver

        place = kernel.fn.__module__, name, kernel.cache_key
        # Taken here: the current GPU is a thread's own, and the compiler may set another folder meanwhile.
        work = place, IMPORTED, *rest, driver.active.get_current_target(), settings()
        return _threads().submit(_by_process, name, work, compile_here)


def _by_process(name: str, work: tuple[Any, ...], compile_here: Callable[[], Any]) -> Any:
    from torch._inductor.async_compile import AsyncCompile

    pool: Any = AsyncCompile.process_pool()
    with suppress(Exception):  # which is reported
        _reporting(name, pool.submit(compile_kernel, *work).result)
    return compile_here()  # a cache hit, or the whole compilation


def _reporting(name: str, compile_kernel: Callable[[], Any]) -> Any:
    """Compile a kernel; report only the first failure: others are likely to be like it, and only time is lost."""
    global _said
    try:
        return compile_kernel()
    except Exception as error:
        with _saying:
            said, _said = _said, True
        if not said:
            lines = [line for line in str(error).splitlines() if line.strip(" ^")] or [type(error).__name__]
            note(f"{name} could not be compiled ahead, which delays its first launch: {lines[-1].strip()}")
        raise


def wait_for_compiles() -> None:
    """Wait for what is still compiled."""
    global _compiling
    if _compiling is None:
        return
    with _lock:
        if _compiling is not None:
            (mode, context, _), _compiling = _compiling, None
            context.run(mode.__exit__, None, None, None)


def compile_from_fake_tensors(name: str, run: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Compile the kernels of an operator's call that the compiler traces with fake tensors.

    Args:
        name: name of the operator.
        run: the operator, which must take fake tensors.
        args: arguments of the call.

    """
    tensors = [x for x in args if isinstance(x, Tensor)]
    if not all(isinstance(x, FakeTensor) and compiles(x.device) for x in tensors):
        return
    layouts = [(*x.shape, *x.stride(), x.storage_offset()) for x in tensors]
    if any(type(n) is not int for layout in layouts for n in layout):  # reading symbols would bind them
        return
    rest = [(x.ndim, x.dtype, x.device) if isinstance(x, Tensor) else x for x in args]
    call = name, *layouts, *rest
    if call not in _foreseen:
        _foreseen.add(call)
        with compile_only(tensors[0].device):
            run(*args)


def address(x: Tensor) -> int:
    """Return a tensor's address; a compiler's fake tensor gets one that is aligned as allocators align it."""
    return int(x.storage_offset()) * x.itemsize if isinstance(x, FakeTensor) else x.data_ptr()


def mock_tensor(x: Tensor) -> Any:
    """The tensor, or for one that a compiler traces with what takes its place in a launch, as it lies nowhere."""
    return _stand_in(x) if isinstance(x, FakeTensor) else x


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
    return ThreadPoolExecutor(cores_each(), "compile-kernels")


def _stand_in(argument: Any) -> Any:
    """Return a stand-in on which Triton specialises as on the argument: an aligned tensor of its format."""
    from triton.runtime.jit import MockTensor

    if isinstance(argument, tuple):  # a named one stays so: the kernel reads its names
        return getattr(argument, "_make", tuple)(map(_stand_in, argument))
    if hasattr(argument, "block_shape"):  # a descriptor of tiles
        return replace(argument, base=_stand_in(argument.base))
    return MockTensor(argument.dtype) if isinstance(argument, Tensor) else argument
