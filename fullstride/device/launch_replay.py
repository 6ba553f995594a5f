"""Calls that allocate tensors and launch kernels, repeated without the Python that leads to them.

Which tensors a fused op allocates, and which kernels it launches with which constants, follows from its arguments'
shapes, strides, formats and alignment. Working that out takes the host several times as long as allocating and
launching itself, so it is done once: `Replayed` notes what the second call of a kind does, and later ones repeat it.
"""

import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

# So many kinds of calls are kept: shapes that never come back would fill the memory.
MOST_KINDS = 4096
ALIGNMENT = 16  # bytes; Triton compiles for addresses that are multiples of it, or not
_PLAIN = frozenset({Tensor, nn.Parameter})
_ALLOCATIONS = frozenset({
    torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.empty_strided, torch.ops.aten.new_empty,
    torch.ops.aten.new_empty_strided,
})  # fmt: skip
_ZEROS = frozenset({torch.ops.aten.zeros, torch.ops.aten.zeros_like, torch.ops.aten.new_zeros})
_thread = threading.local()
Pool = list[Any]


class Unrepeatable(Exception):  # noqa: N818, as it is no failure
    """A call computes something besides its kernels, or hands on a part of a tensor."""


def launch(kernel: Any, grid: tuple[int, ...], arguments: Sequence[Any], options: dict[str, Any]) -> None:
    """Launch a Triton kernel, and note that for the call that is being noted, if there is one."""
    notes: _Notes | None = getattr(_thread, "notes", None)
    if notes is None:
        kernel[grid](*arguments, **options)
        return
    with _disable_current_modes():  # Triton's interpreter copies tensors
        compiled = kernel[grid](*arguments, **options)
    if compiled is None:  # by the interpreter, which compiles nothing
        notes.launches.append((partial(kernel[grid], **options), arguments))
        return
    given = dict(zip(kernel.arg_names, arguments, strict=False)) | options
    notes.launches.append((_launcher(compiled, (*grid, 1, 1)[:3]), [given[name] for name in kernel.arg_names]))


def _launcher(compiled: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
    """Return a function that launches a compiled kernel, without describing that to hooks where there are none."""
    from triton import knobs
    from triton.runtime import driver

    gpu: Any = driver.active
    described, device = compiled[grid], gpu.get_current_device()
    bare, stream_of = partial(compiled.run, *grid), gpu.get_current_stream
    rest = compiled.function, compiled.packed_metadata, None, None, None

    def run(*arguments: Any) -> None:
        if _has_calls(knobs.runtime.launch_enter_hook) or _has_calls(knobs.runtime.launch_exit_hook):
            described(*arguments)
        else:
            bare(stream_of(device), *rest, *arguments)

    return run


def _has_calls(hook: Any) -> bool:
    """Return whether a hook of Triton's does anything: it is a chain of functions, in earlier versions one or None."""
    return bool(getattr(hook, "calls", hook))


def note_nothing_launched() -> None:
    """Note that a launch was only compiled, so that the call that is being noted is not whole."""
    if (notes := getattr(_thread, "notes", None)) is not None:
        notes.whole = False


class _Notes(TorchDispatchMode):
    """Notes what a call allocates and launches."""

    def __init__(self) -> None:
        super().__init__()
        self.allocated: list[list[Tensor]] = []  # each under all the names that PyTorch gives it
        self.zeros: list[bool] = []  # whether it is filled with them
        self.launches: list[tuple[Callable[..., Any], Sequence[Any]]] = []  # and copies
        self.whole = True  # whether that is all that it does

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in _ALLOCATIONS | _ZEROS:
            self.allocated.append([out])
            self.zeros.append(func.overloadpacket in _ZEROS)
        elif func.overloadpacket is torch.ops.aten.clone:  # by `contiguous`, say
            self.allocated.append([out])
            self.zeros.append(False)
            self.launches.append((Tensor.copy_, (out, args[0])))
        elif func.overloadpacket is torch.ops.aten.detach:  # which a factory calls
            for names in self.allocated:
                if any(x is args[0] for x in names):
                    names.append(out)
        elif not func.is_view:  # a view that matters is met again among the arguments of a launch
            self.whole = False
        return out

    def __enter__(self) -> Any:
        _thread.notes = self
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        _thread.notes = None
        super().__exit__(*error)


class _Repetition:
    """A noted call: what it allocates, launches and returns, as places in a pool.

    The pool holds the call's tensors, then what it allocates, then constants, and tuples and descriptors of these.
    """

    def __init__(self, notes: _Notes, inputs: Sequence[Tensor], outputs: Sequence[Any]):
        """Build it; Unrepeatable for a tensor that is neither given nor allocated."""
        known = [*([x] for x in inputs), *notes.allocated]
        self._places = {id(x): i for i, names in enumerate(known) for x in names}
        made = [x for x, *_ in notes.allocated]
        self._allocations = [(_allocator(x), zeros) for x, zeros in zip(made, notes.zeros, strict=True)]
        self._first, self._rest = len(known), list[Any]()
        self._made = list[tuple[int, Callable[[Pool], Any]]]()
        self._launches = [(run, self._all(arguments)) for run, arguments in notes.launches]
        self._outputs = self._all(outputs)
        del self._places

    def __call__(self, inputs: Sequence[Tensor]) -> tuple[Any, ...]:
        """Repeat the call on other tensors of the same kind."""
        pool: Pool = [*inputs]
        for allocate, zeros in self._allocations:
            pool.append(allocate().zero_() if zeros else allocate())
        pool += self._rest
        for place, make in self._made:
            pool[place] = make(pool)
        for run, arguments in self._launches:
            run(*arguments(pool))
        return self._outputs(pool)

    def _all(self, values: Iterable[Any]) -> Callable[[Pool], tuple[Any, ...]]:
        places = [self._place(x) for x in values]
        if len(places) > 1:
            return itemgetter(*places)
        return lambda pool: tuple(pool[place] for place in places)

    def _place(self, x: Any) -> int:
        if isinstance(x, Tensor):
            if id(x) not in self._places:
                raise Unrepeatable
            return self._places[id(x)]
        if hasattr(x, "block_shape"):
            return self._added(None, _described(x, self._place(x.base)))
        if _holds_tensors(x):
            return self._added(None, self._all(x))
        return self._added(x)

    def _added(self, x: Any, make: Callable[[Pool], Any] | None = None) -> int:
        self._rest.append(x)
        place = self._first + len(self._rest) - 1
        if make is not None:
            self._made.append((place, make))
        return place


def _allocator(x: Tensor) -> Callable[[], Tensor]:
    """Return a function that allocates a tensor like x as the compiler's own code does it, on the current GPU."""
    guards: Any = torch._C._dynamo.guards  # pyright: ignore[reportAttributeAccessIssue]
    allocate = guards._empty_strided_cuda if x.is_cuda else guards._empty_strided_cpu
    return partial(allocate, tuple(x.shape), x.stride(), x.dtype)


def _described(descriptor: Any, base: int) -> Callable[[Pool], Any]:
    """Return a function that describes the tiles of another tensor of the same kind."""
    kind, fields = type(descriptor), {**vars(descriptor), "base": None}

    def make(pool: Pool) -> Any:
        made = object.__new__(kind)  # without the checks of its constructor, which the first has passed
        made.__dict__ = {**fields, "base": pool[base]}
        return made

    return make


def _holds_tensors(x: Any) -> bool:
    if isinstance(x, tuple):
        return any(map(_holds_tensors, x))
    return isinstance(x, Tensor) or hasattr(x, "block_shape")


class Replayed:
    """A function of tensors and constants that allocates and launches kernels, noted once for each kind of call.

    A call of a kind that is new, that computes anything besides its kernels, that a dispatch mode sees, or of tensors
    that are negated lazily, runs as it is. The function must depend on its arguments alone, and on tensors by their
    kind.
    """

    def __init__(self, run: Callable[..., Sequence[Any]]):
        """Make it of a function that returns tensors, or None for an absent one."""
        self._run = run
        self._kinds = dict[Hashable, _Repetition | bool]()  # whether a kind that is not noted can be

    def __call__(self, *args: Any, state: Hashable = None) -> Sequence[Any]:
        """Call the function; `state` is what else it depends on."""
        if torch._C._len_torch_dispatch_stack():
            return self._run(*args)
        kind, inputs = [state], list[Tensor]()
        for x in args:
            if type(x) in _PLAIN and not x.is_neg() and not x._is_zerotensor():
                kind += x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % ALIGNMENT
                inputs.append(x)
            elif isinstance(x, Tensor):
                return self._run(*args)
            else:
                kind.append(x)
        key = tuple(kind)
        known = self._kinds.get(key)
        if isinstance(known, _Repetition):
            return known(inputs)
        if known:
            return self._noted(key, args)
        if known is None:
            if len(self._kinds) >= MOST_KINDS:
                self._kinds.clear()
            self._kinds[key] = True
        return self._run(*args)

    def _noted(self, key: Hashable, args: tuple[Any, ...]) -> Sequence[Any]:
        """Run a call and note it, on objects of its own for each tensor: one that is given twice need not be again."""
        args = tuple(x.detach() if isinstance(x, Tensor) else x for x in args)
        with _Notes() as notes:
            outputs = self._run(*args)
        self._kinds[key] = False
        if notes.whole:
            with suppress(Unrepeatable):
                self._kinds[key] = _Repetition(notes, [x for x in args if isinstance(x, Tensor)], outputs)
        return outputs
