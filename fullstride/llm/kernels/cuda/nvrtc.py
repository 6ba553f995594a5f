"""Compiler from CUDA C++ to PTX: NVRTC through ctypes, from JAX's or PyTorch's CUDA packages."""

import ctypes
import functools
import hashlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path

from fullstride.assets.fetch import cache_folder
from fullstride.errors import ConfigError
from fullstride.runs.atomic_files import write_best_effort

OPTIONS = ("--std=c++17", "--use_fast_math", "-default-device", "-diag-suppress=177")
FILES = ("libnvrtc.so.13", "libnvrtc.so.12")


@functools.cache
def library() -> ctypes.CDLL:
    """Load NVRTC from NVIDIA's package or from the system's library path.

    Raises:
        ConfigError: if there is none.

    """
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []
    found = [path for folder in folders for name in FILES for path in sorted(folder.glob(f"*/lib/{name}"))]
    for path in [*found, *map(Path, FILES)]:
        try:
            # NVRTC asks for its other half by name alone, which is found if it is loaded already.
            for other in path.parent.glob("libnvrtc-builtins.so.*"):
                ctypes.CDLL(str(other))
            return ctypes.CDLL(str(path))
        except OSError:
            continue
    raise ConfigError("NVRTC, which compiles the kernels, was not found: run pip install 'jax[cuda13]'")


@functools.cache
def ptx(source: str, name: str, architecture: str) -> str:
    """Compile a source to PTX, or read it from fullstride's cache if an earlier process compiled it.

    Args:
        source: source of one file, without includes.
        name: name in error messages.
        architecture: of the instruction set, as `80` or `90a`.

    Raises:
        RuntimeError: with the compiler's message.

    """
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(library(), library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    options = (f"--gpu-architecture=compute_{architecture}", *OPTIONS)
    told = "\n".join((*options, f"NVRTC {major.value}.{minor.value}", source))
    path = cache_folder() / "ptx" / f"{hashlib.sha256(told.encode()).hexdigest()}.ptx"
    try:
        return path.read_text()
    except OSError:
        compiled = _compiled(source, name, options)
    write_best_effort(path, compiled)
    return compiled


def _compiled(source: str, name: str, options: Sequence[str]) -> str:
    lib, program = library(), ctypes.c_void_p()
    _check(lib, lib.nvrtcCreateProgram(ctypes.byref(program), source.encode(), name.encode(), 0, None, None))
    try:
        given = [option.encode() for option in options]
        failed = lib.nvrtcCompileProgram(program, len(given), (ctypes.c_char_p * len(given))(*given))
        if failed:
            raise RuntimeError(f"{name}: NVRTC could not compile it: {_text(lib, program, 'ProgramLog')}")
        return _text(lib, program, "PTX")
    finally:
        lib.nvrtcDestroyProgram(ctypes.byref(program))


def _text(lib: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> str:
    size = ctypes.c_size_t()
    _check(lib, getattr(lib, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(lib, getattr(lib, f"nvrtcGet{what}")(program, buffer))
    return buffer.value.decode()


def _check(lib: ctypes.CDLL, code: int) -> None:
    if code:
        lib.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise RuntimeError(f"NVRTC: {lib.nvrtcGetErrorString(code).decode()}")
