"""XLA's foreign function interface by ctypes: a function of Python that XLA calls with the addresses of buffers.

Where XLA records a CUDA graph it is called for the record alone. The structures are those of xla/ffi/api/c_api.h, whose
interface XLA keeps stable.
"""

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

EXECUTE, METADATA, RECORDABLE, INTERNAL = 3, 1, 1, 13


class Call(NamedTuple):
    """What XLA asks for.

    Attributes:
        name: of the call site, its attribute `name`.
        pointers: to the operands and then to the results.
        stream: handle of the device's stream; a function, as a CPU has none.

    """

    name: str
    pointers: list[int]
    stream: Callable[[], int]


class _Head(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("extension", ctypes.c_void_p)]


class _Span(ctypes.Structure):
    _fields_ = [("text", ctypes.c_void_p), ("length", ctypes.c_size_t)]


class _Buffer(ctypes.Structure):
    _fields_ = [("head", _Head), ("dtype", ctypes.c_int), ("data", ctypes.c_void_p)]


class _Buffers(ctypes.Structure):
    _fields_ = [
        ("head", _Head),
        ("count", ctypes.c_int64),
        ("types", ctypes.c_void_p),
        ("items", ctypes.POINTER(ctypes.POINTER(_Buffer))),
    ]


class _Attributes(ctypes.Structure):
    _fields_ = [
        ("head", _Head),
        ("count", ctypes.c_int64),
        ("types", ctypes.c_void_p),
        ("names", ctypes.POINTER(ctypes.POINTER(_Span))),
        ("values", ctypes.POINTER(ctypes.POINTER(_Span))),
    ]


class _Version(ctypes.Structure):
    _fields_ = [("head", _Head), ("major", ctypes.c_int), ("minor", ctypes.c_int)]


# The functions up to the one that is called here.
_FUNCTIONS = ("error_create", "error_get_message", "error_destroy", "handler_register", "stream_get")


class _Api(ctypes.Structure):
    _fields_ = [("head", _Head), ("version", _Version), ("internal", ctypes.c_void_p)]
    _fields_ += [(name, ctypes.c_void_p) for name in _FUNCTIONS]


class _Frame(ctypes.Structure):
    _fields_ = [
        ("head", _Head),
        ("api", ctypes.POINTER(_Api)),
        ("context", ctypes.c_void_p),
        ("stage", ctypes.c_int),
        ("operands", _Buffers),
        ("results", _Buffers),
        ("attributes", _Attributes),
    ]


class _Extension(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("next", ctypes.c_void_p),
        ("value", ctypes.c_void_p),
    ]


class _Metadata(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("version", _Version), ("traits", ctypes.c_uint32)]


class _Stream(ctypes.Structure):
    _fields_ = [("head", _Head), ("context", ctypes.c_void_p), ("stream", ctypes.c_void_p)]


class _Destroy(ctypes.Structure):
    _fields_ = [("head", _Head), ("error", ctypes.c_void_p)]


class _Error(ctypes.Structure):
    _fields_ = [("head", _Head), ("message", ctypes.c_char_p), ("code", ctypes.c_int)]


_FROM_STRUCT = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
# Functions that XLA may call as long as the process lives.
_kept: list[Any] = []


def register(target: str, platform: str, execute: Callable[[Call], None]) -> None:
    """Let XLA call `execute` for custom calls of this target, which name themselves by an attribute `name`.

    Args:
        target: of `jax.ffi.ffi_call`, and lowerings.
        platform: `cuda` or `cpu`.
        execute: has to put the same work onto the stream for the same name; what it raises is the computation's error.

    """

    def handle(frame: Any) -> int | None:
        try:
            if frame.contents.head.extension:
                _describe(frame.contents)
            elif frame.contents.stage == EXECUTE:
                execute(_call(frame.contents))
        except Exception as error:
            return _failed(frame.contents, f"{type(error).__name__}: {error}")
        return None

    function = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_Frame))(handle)
    _kept.append(function)
    capsule = jax.ffi.pycapsule(ctypes.cast(function, ctypes.c_void_p).value)
    jax.ffi.register_ffi_target(target, capsule, platform=platform, api_version=1)


def _describe(frame: _Frame) -> None:
    extension = ctypes.cast(frame.head.extension, ctypes.POINTER(_Extension)).contents
    if extension.type != METADATA:
        return
    metadata = ctypes.cast(extension.value, ctypes.POINTER(_Metadata)).contents
    metadata.version.major, metadata.version.minor = frame.api.contents.version.major, frame.api.contents.version.minor
    metadata.traits = RECORDABLE


def _call(frame: _Frame) -> Call:
    pointers = [
        (buffers.items[i].contents.data or 0)
        for buffers in (frame.operands, frame.results)
        for i in range(buffers.count)
    ]
    attributes = frame.attributes
    names = {_text(attributes.names[i].contents): i for i in range(attributes.count)}
    name = _text(attributes.values[names["name"]].contents)
    api, context = frame.api.contents, frame.context

    def stream() -> int:
        asked = _Stream(_Head(ctypes.sizeof(_Stream), None), context, None)
        error = _FROM_STRUCT(api.stream_get)(ctypes.addressof(asked))
        if error:
            gone = _Destroy(_Head(ctypes.sizeof(_Destroy), None), error)
            _FROM_STRUCT(api.error_destroy)(ctypes.addressof(gone))
            raise RuntimeError("XLA gave no stream")
        return asked.stream or 0

    return Call(name, pointers, stream)


def _text(span: _Span) -> str:
    return ctypes.string_at(span.text, span.length).decode()


def _failed(frame: _Frame, message: str) -> int | None:
    text = message.encode()
    asked = _Error(_Head(ctypes.sizeof(_Error), None), text, INTERNAL)
    return _FROM_STRUCT(frame.api.contents.error_create)(ctypes.addressof(asked))
