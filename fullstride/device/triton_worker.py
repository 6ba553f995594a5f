"""Work of a compiler process: compiles a kernel into Triton's cache, for a GPU that it never uses.

Half of a kernel's compilation is Python, for which threads of one process wait in turn, and with them whoever traces.
"""

import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PREFIX = "TRITON_"


class OfflineDriver:
    """Driver of an absent GPU, with what a launch needs."""

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
    """Return this process's Triton settings, which decide how a kernel is compiled and where it is cached."""
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
    driver.set_active(OfflineDriver(target))  # pyright: ignore[reportArgumentType]
    get_ptxas_version.cache_clear()
    try:
        yield
    finally:
        driver.set_active(None)  # pyright: ignore[reportArgumentType]  # the GPU's own, on demand
        for key in given:
            os.environ.pop(key)
        os.environ.update(kept)
        get_ptxas_version.cache_clear()


def changed_since(moment: float, project: str) -> list[str]:
    """Return the files of a project's modules imported by this process that changed after a time."""
    modules = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == project]
    files = {Path(file) for module in modules if (file := getattr(module, "__file__", None))}
    return sorted(str(file) for file in files if not file.is_file() or file.stat().st_mtime > moment)


def compile_kernel(
    name: tuple[str, str, str],
    imported: float,
    grid: tuple[int, ...],
    arguments: Sequence[Any],
    options: dict[str, Any],
    *where: Any,
) -> None:
    """Compile a kernel for arguments, which stand in for those of a launch.

    Args:
        name: names of the kernel's module, of the kernel, and of its source in the cache.
        imported: time of the requesting process's import, in seconds since the epoch.
        grid: numbers of programs.
        arguments: arguments of the kernel.
        options: other options of the launch.
        where: as `compiling_for`.

    Raises:
        RuntimeError: if this process may have imported another source than the requesting one, as after an edit.

    """
    module, function, key = name
    kernel: Any = getattr(importlib.import_module(module), function)
    if changed := changed_since(imported, module.partition(".")[0]):
        raise RuntimeError(f"{changed[0]} was changed since the training process started; restart it")
    with compiling_for(*where):
        # Triton's key of a source depends on which other keys were computed before (Triton 3.6, `_update_hash`).
        assert kernel.cache_key
        kernel.hash = key
        kernel.warmup(*arguments, grid=grid, **options)
