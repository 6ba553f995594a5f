"""Kernel launches by CUDA's driver API, through ctypes: for launches that JAX's own call does not support."""

import ctypes
import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from fullstride.errors import ConfigError

SHARED_BYTES_LIMIT = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
EARLY = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
ENABLED_ALREADY = 704  # CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int * 16)]


class _Config(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    ]


@functools.cache
def library() -> ctypes.CDLL:
    """Load the driver library.

    Raises:
        ConfigError: if there is none.

    """
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise ConfigError("libcuda.so.1 was not found: install an NVIDIA driver") from None


@functools.cache
def function(ptx: str, name: str) -> ctypes.c_void_p:
    """A kernel, which serves all devices."""
    code, made, found = ptx.encode(), ctypes.c_void_p(), ctypes.c_void_p()
    _check(library().cuLibraryLoadData(ctypes.byref(made), code, None, None, 0, None, None, 0))
    _check(library().cuLibraryGetKernel(ctypes.byref(found), made, name.encode()))
    return found


def device() -> int:
    """Return the device ordinal of the current CUDA context."""
    found = ctypes.c_int()
    _check(library().cuCtxGetDevice(ctypes.byref(found)))
    return found.value


def reach_each_other(ordinals: Sequence[int]) -> bool:
    """Enable peer access between these GPUs; return whether every pair supports it."""
    for own in ordinals:
        for other in ordinals:
            can = ctypes.c_int(1)
            if own != other:
                _check(library().cuDeviceCanAccessPeer(ctypes.byref(can), own, other))
            if not can.value:
                return False
    for own in ordinals:
        with _within(own):
            for other in ordinals:
                if own != other and (code := library().cuCtxEnablePeerAccess(_context(other), 0)) != ENABLED_ALREADY:
                    _check(code)
    return True


def zeros(ordinal: int, count: int) -> int:
    """Allocate zeroed GPU memory for the life of the process, and return its address."""
    with _within(ordinal):
        found = ctypes.c_uint64()
        _check(library().cuMemAlloc_v2(ctypes.byref(found), ctypes.c_size_t(count)))
        _check(library().cuMemsetD8_v2(found, ctypes.c_ubyte(0), ctypes.c_size_t(count)))
        _check(library().cuCtxSynchronize())
    return found.value


@functools.cache
def _context(ordinal: int) -> ctypes.c_void_p:
    """The one that everything of a process has of a GPU."""
    found = ctypes.c_void_p()
    _check(library().cuDevicePrimaryCtxRetain(ctypes.byref(found), ordinal))
    return found


@contextmanager
def _within(ordinal: int) -> Iterator[None]:
    before = ctypes.c_void_p()
    _check(library().cuCtxPushCurrent_v2(_context(ordinal)))
    try:
        yield
    finally:
        _check(library().cuCtxPopCurrent_v2(ctypes.byref(before)))


@functools.cache
def _allow_shared(kernel: int, device: int, shared: int) -> None:
    _check(library().cuKernelSetAttribute(SHARED_BYTES_LIMIT, shared, ctypes.c_void_p(kernel), device))


class PreparedLaunch:
    """Kernel launch that is ready except for its stream and pointers.

    Args:
        kernel: from `function`.
        grid: blocks.
        threads: threads of a block.
        shared: bytes of a block's dynamic shared memory.
        pointers: number of parameters.
        early: whether its blocks may begin before the previous launch has ended.

    """

    def __init__(
        self, kernel: ctypes.c_void_p, grid: tuple[int, int, int], threads: int, shared: int, pointers: int, early: bool
    ):
        """Nothing is launched."""
        self.kernel, self.shared = kernel, shared
        self._attribute = _Attribute(EARLY, 0, (ctypes.c_int * 16)(1))
        attributes = ctypes.pointer(self._attribute) if early else None
        self._config = _Config(grid, (threads, 1, 1), shared, None, attributes, int(early))
        self._values = (ctypes.c_uint64 * pointers)()
        places = [ctypes.addressof(self._values) + 8 * i for i in range(pointers)]
        self._parameters = (ctypes.c_void_p * pointers)(*places)

    def __call__(self, stream: int, pointers: Sequence[int]) -> None:
        """Put it onto a stream of the present context.

        Raises:
            RuntimeError: with the driver's message.

        """
        _allow_shared(self.kernel.value, device(), self.shared)
        self._config.stream, self._values[:] = stream, pointers
        _check(library().cuLaunchKernelEx(ctypes.byref(self._config), self.kernel, self._parameters, None))


def _check(code: int) -> None:
    if code:
        text = ctypes.c_char_p()
        library().cuGetErrorString(code, ctypes.byref(text))
        raise RuntimeError(f"CUDA driver: error {code}: {(text.value or b'unknown').decode()}")
