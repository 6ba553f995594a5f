"""CUDA kernels on a CPU: their source behind `device_on_host.h`, compiled by g++, every thread of the grid a fiber."""

import ctypes
import functools
import hashlib
import os
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.interpreters import mlir

from fullstride.llm.kernels.cuda.chain import ChainLaunch, chain_p
from fullstride.llm.kernels.cuda.launch import Kernel, kernel_p

HERE = Path(__file__).parent
COMPILER = (
    "g++",
    "-std=c++17",
    "-O2",
    "-shared",
    "-fPIC",
    "-w",
    "-fno-strict-aliasing",
    "-ftrivial-auto-var-init=pattern",
)
# Bytes around each array, in which a kernel may neither write nor find numbers.
EDGE = 256
# Blocks that are alive together: as many as a GPU of this size has room for.
RESIDENT = 132
_running = threading.Lock()


class EmulationError(RuntimeError):
    """Fault of an emulated kernel."""


@functools.cache
def library(kernel: Kernel) -> Any:
    """The compiled kernel's entry, from a folder for all processes."""
    parts = [(HERE / "fibers.h").read_text(), (HERE / "device_on_host.h").read_text(), '#line 1 "kernel"', kernel.body]
    entry = (
        'extern "C" const char* run(void** pointers, int count, const host::Range* ranges, int range_count,'
        " const int* grid, int threads, u64 shared, int resident, u64 seed) {"
        f" return emulate({kernel.name}, pointers, count, ranges, range_count, grid, threads, shared,"
        f" cluster_of_{kernel.name}, resident, seed); }}"
    )
    source = "\n".join([*parts, entry])
    folder = Path(tempfile.gettempdir()) / f"fullstride-emulated-{os.getuid()}"
    path = folder / f"{kernel.name}-{hashlib.sha256((source + str(COMPILER)).encode()).hexdigest()[:20]}.so"
    if not path.exists():
        folder.mkdir(exist_ok=True)
        text, made = path.with_suffix(f".{os.getpid()}.cpp"), path.with_suffix(f".{os.getpid()}.so")
        text.write_text(source)
        try:
            done = subprocess.run([*COMPILER, str(text), "-o", str(made)], capture_output=True, text=True)
        except FileNotFoundError:
            raise EmulationError("g++ was not found: install a C++ compiler, such as Debian's package g++") from None
        if done.returncode:
            raise EmulationError(f"{kernel.name}: g++ could not compile it: {done.stderr}")
        made.replace(path)
        text.unlink()
    run_ = ctypes.CDLL(str(path)).run
    run_.restype = ctypes.c_char_p
    run_.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
    run_.argtypes += [ctypes.c_uint64, ctypes.c_int, ctypes.c_uint64]
    return run_


class _Guarded:
    """A copy of an array with bytes around it that have to stay."""

    def __init__(self, shape: tuple[int, ...], dtype: Any, data: np.ndarray | None):
        self.size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        room = np.full(self.size + 2 * EDGE + EDGE, 0xFF, np.uint8)
        self.whole = room[-room.ctypes.data % EDGE :][: self.size + 2 * EDGE]
        self.bytes = self.whole[EDGE : EDGE + self.size]
        self.array = self.bytes.view(dtype).reshape(shape)
        if data is not None:
            self.array[...] = data

    def check(self, name: str) -> None:
        edges = np.concatenate([self.whole[:EDGE], self.whole[EDGE + self.size :]])
        if (edges != 0xFF).any():
            raise EmulationError(f"written beyond {name}")


def run(
    kernel: Kernel,
    grid: tuple[int, int, int],
    operands: Sequence[np.ndarray],
    results: Sequence[Any],
    aliases: Mapping[int, int] | None = None,
    *,
    seed: int = 0,
    resident: int = RESIDENT,
) -> list[np.ndarray]:
    """Run it as `launch.call` would.

    Args:
        kernel: to be compiled, once.
        grid: blocks.
        operands: of the kernel.
        results: with shape and dtype; NaN before unless an operand is aliased to it.
        aliases: operands that results replace.
        seed: of the order in which threads have their turns; 0 is theirs.
        resident: blocks that are alive together; others follow when those end.

    Raises:
        EmulationError: with what the kernel did wrong and where.

    """
    aliases = dict(aliases or {})
    given = [_Guarded(x.shape, x.dtype, x) for x in operands]
    sources = {result: operand for operand, result in aliases.items()}
    made = [given[sources[i]] if i in sources else _Guarded(x.shape, x.dtype, None) for i, x in enumerate(results)]
    arrays = [*given, *made]
    pointers = [x.array.ctypes.data for x in arrays]
    _launch(kernel, grid, pointers, [(x.array.ctypes.data, x.size, 0) for x in arrays], seed, resident)
    _check(kernel.name, operands, given, arrays, aliases)
    return [x.array for x in made]


def _launch(kernel: Kernel, grid: Any, pointers: Sequence[int], ranges: Any, seed: int, resident: int) -> None:
    where, spans, sizes = np.array(pointers, np.uint64), np.array(ranges, np.uint64), np.array(grid, np.int32)
    with _running:
        error = library(kernel)(
            where.ctypes.data, len(where), spans.ctypes.data, len(spans), sizes.ctypes.data,
            kernel.threads, kernel.shared, resident, seed,
        )  # fmt: skip
    if error:
        raise EmulationError(f"{kernel.name}: {error.decode()}")


def _check(name: str, operands: Any, given: Any, arrays: Any, aliases: Mapping[int, int]) -> None:
    for i, x in enumerate(arrays):
        x.check(f"array {i} of {name}")
    for i, x in enumerate(operands):
        if i not in aliases and not np.array_equal(given[i].bytes, np.ascontiguousarray(x).view(np.uint8).reshape(-1)):
            raise EmulationError(f"{name} wrote into operand {i}, which no result replaces")


def run_chain(
    links: Sequence[ChainLaunch],
    operands: Sequence[np.ndarray],
    results: Sequence[Any],
    aliases: Mapping[int, int],
    *,
    seed: int = 0,
    resident: int = RESIDENT,
) -> list[np.ndarray]:
    """Run them one after the other, as `chain` would; what links write may not be touched before it is awaited.

    The pool, which has five axes, is the exception: links read what earlier steps have written there.
    """
    given = [_Guarded(x.shape, x.dtype, x) for x in operands]
    sources = {result: operand for operand, result in aliases.items()}
    made = [given[sources[i]] if i in sources else _Guarded(x.shape, x.dtype, None) for i, x in enumerate(results)]
    arrays = [*given, *made]
    late = {x.array.ctypes.data for x in made if x.array.ndim != 5}
    ranges = [(x.array.ctypes.data, x.size, x.array.ctypes.data in late) for x in arrays]
    for link in links:
        pointers = [arrays[place].array.ctypes.data + offset for place, offset in link.pointers]
        _launch(link.kernel, link.grid, pointers, ranges, seed, resident)
    _check("chain", operands, given, arrays, aliases)
    return [x.array for x in made]


def _emulated(*operands: jax.Array, kernel: Kernel, grid: Any, shapes: Any, aliases: Any) -> Any:
    def callback(*arrays: Any) -> list[np.ndarray]:
        return run(kernel, grid, [np.asarray(x) for x in arrays], shapes, dict(aliases), seed=_seed)

    results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in shapes]
    return jax.pure_callback(callback, results, *operands)


def _emulated_chain(*operands: jax.Array, links: Any, shapes: Any, aliases: Any) -> Any:
    def callback(*arrays: Any) -> list[np.ndarray]:
        return run_chain(links, [np.asarray(x) for x in arrays], shapes, dict(aliases), seed=_seed)

    results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in shapes]
    return jax.pure_callback(callback, results, *operands)


_seed = 0


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """The order of threads in traced code that runs meanwhile."""
    global _seed
    _seed = seed
    try:
        yield
    finally:
        _seed = 0


# From now on traced code that calls kernels runs on a CPU, too.
mlir.register_lowering(kernel_p, mlir.lower_fun(_emulated, multiple_results=True), platform="cpu")
mlir.register_lowering(chain_p, mlir.lower_fun(_emulated_chain, multiple_results=True), platform="cpu")
