"""The part of a compiling process: a kernel for a GPU that this process never speaks to, into Triton's cache.

Half of a kernel's compilation is Python, for which threads of one process wait in turn, and with them whoever traces.
"""

import hashlib
import importlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from types import CodeType, ModuleType
from typing import Any

PREFIX = "TRITON_"


class Absent:
    """What a launch asks of a driver, of a GPU that is not there."""

    def __init__(self, target: Any):
        """Take Triton's description of the GPU."""
        self._target = target

    def get_current_target(self) -> Any:
        """The GPU that is compiled for."""
        return self._target

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """The only one."""
        return device


def settings() -> dict[str, str]:
    """Triton's of this process, which decide what a kernel becomes and where it is kept."""
    from triton import knobs

    given = {key: value for key, value in os.environ.items() if key.startswith(PREFIX)}
    return given | {f"{PREFIX}CACHE_DIR": knobs.cache.dir}


@contextmanager
def compiling_for(target: Any, given: dict[str, str]) -> Iterator[None]:
    """Triton compiles for a GPU with another process's settings: the compiler's have an assembler of their own."""
    from triton.backends.nvidia.compiler import get_ptxas_version
    from triton.runtime import driver

    kept = {key: os.environ.pop(key) for key in list(os.environ) if key.startswith(PREFIX)}
    os.environ.update(given)
    driver.set_active(Absent(target))  # pyright: ignore[reportArgumentType]
    get_ptxas_version.cache_clear()
    try:
        yield
    finally:
        driver.set_active(None)  # pyright: ignore[reportArgumentType]  # the GPU's, when it is asked for
        for key in given:
            os.environ.pop(key)
        os.environ.update(kept)
        get_ptxas_version.cache_clear()


@cache
def source_of(kernel: Any) -> str:
    """Digest of a kernel as this process has imported it: its source, that of all it calls, constants of both."""
    from triton.language import constexpr, dtype
    from triton.runtime.jit import JITCallable

    found, waiting, seen = set[tuple[str, ...]](), [kernel], set[str]()
    while waiting:
        function = waiting.pop()
        place = f"{function.fn.__module__}.{function.fn.__qualname__}"
        if place in seen:
            continue
        seen.add(place)
        found.add((place, function.src, repr(function.fn.__defaults__), repr(getattr(function, "noinline", None))))
        for scope, name, value in _named(function.fn):
            if isinstance(value, JITCallable):
                waiting.append(value)
            elif isinstance(value, (constexpr, dtype, bool, int, float, str)):
                found.add((place, scope, name, repr(value)))
    return hashlib.sha256(repr(sorted(found)).encode()).hexdigest()


def _named(function: Any) -> Iterator[tuple[str, str, Any]]:
    """What the names in a function stand for: in its module, around it, in modules that it names; each with where."""
    names, cells = _names(function.__code__), [cell.cell_contents for cell in function.__closure__ or ()]
    around = dict(zip(function.__code__.co_freevars, cells, strict=True))
    waiting, seen = [("", {**function.__globals__, **around})], set[int]()
    while waiting:
        scope, values = waiting.pop()
        for name in names & values.keys():
            value = values[name]
            if isinstance(value, ModuleType) and id(value) not in seen:
                seen.add(id(value))
                waiting.append((value.__name__, vars(value)))
            yield scope, name, value


def _names(code: CodeType) -> set[str]:
    inner = [_names(each) for each in code.co_consts if isinstance(each, CodeType)]
    return {*code.co_names, *code.co_freevars}.union(*inner)


def compile_kernel(
    name: tuple[str, str, str, str],
    grid: tuple[int, ...],
    arguments: Sequence[Any],
    options: dict[str, Any],
    *where: Any,
) -> None:
    """Compile a kernel for arguments, which stand in for those of a launch.

    Args:
        name: of the kernel's module, in it, its `source_of`, and the name of its source in the cache.
        grid: of programs.
        arguments: of the kernel.
        options: the rest of the launch.
        where: as `compiling_for`.

    Raises:
        RuntimeError: if this process has imported another source than the one that asks, as after an edit.

    """
    module, function, source, key = name
    kernel: Any = getattr(importlib.import_module(module), function)
    if source_of(kernel) != source:
        raise RuntimeError(f"{module}.{function} was changed since the process that trains imported it; start anew")
    with compiling_for(*where):
        # Triton's key of a source depends on which others were asked for theirs before (Triton 3.6, `_update_hash`).
        assert kernel.cache_key
        kernel.hash = key
        kernel.warmup(*arguments, grid=grid, **options)
