"""XLA's foreign function interface by ctypes: a function of Python that XLA calls with the addresses of buffers.

Where XLA records a CUDA graph it is called for the record alone. The structures are those of xla/ffi/api/c_api.h, whose
interface XLA keeps stable.
"""

import ctypes
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

EXECUTE, METADATA, RECORDABLE, INTERNAL = 3, 1, 1, 13


class FfiCall(NamedTuple):
    """Arguments of a call from XLA's foreign function interface.

    Attributes:
        name: attribute `name` of the call site.
        pointers: addresses of the operands, then of the results.
        stream: handle of the device's stream; a function, as a CPU has none.

    """

    name: str
    pointers: list[int]
    stream: Callable[[], int]


def _structure(**fields: Any) -> Any:
    """A structure of C with these fields in this order."""
    return type("Structure", (ctypes.Structure,), {"_fields_": list(fields.items())})


_POINTER, _SIZE, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_Head = _structure(size=_SIZE, extension=_POINTER)
_Span = _structure(text=_POINTER, length=_SIZE)
_Spans = ctypes.POINTER(ctypes.POINTER(_Span))
_Buffer = _structure(head=_Head, dtype=_INT, data=_POINTER)
_Buffers = _structure(head=_Head, count=ctypes.c_int64, types=_POINTER, items=ctypes.POINTER(ctypes.POINTER(_Buffer)))
_Attributes = _structure(head=_Head, count=ctypes.c_int64, types=_POINTER, names=_Spans, values=_Spans)
_Version = _structure(head=_Head, major=_INT, minor=_INT)
# The functions up to the one that is called here.
_FUNCTIONS = ("error_create", "error_get_message", "error_destroy", "handler_register", "stream_get")
_Api = _structure(head=_Head, version=_Version, internal=_POINTER, **dict.fromkeys(_FUNCTIONS, _POINTER))
_Frame = _structure(
    head=_Head,
    api=ctypes.POINTER(_Api),
    context=_POINTER,
    stage=_INT,
    operands=_Buffers,
    results=_Buffers,
    attributes=_Attributes,
)
_Extension = _structure(size=_SIZE, type=_INT, next=_POINTER, value=_POINTER)
_Metadata = _structure(size=_SIZE, version=_Version, traits=ctypes.c_uint32)
_Stream = _structure(head=_Head, context=_POINTER, stream=_POINTER)
_Destroy = _structure(head=_Head, error=_POINTER)
_Error = _structure(head=_Head, message=ctypes.c_char_p, code=_INT)
_FROM_STRUCT = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
# Functions that XLA may call as long as the process lives.
_kept: list[Any] = []


@functools.cache
def register(target: str, platform: str, execute: Callable[[FfiCall], None]) -> None:
    """Let XLA call `execute` for custom calls of this target, which name themselves by an attribute `name`; once.

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
            text = f"{type(error).__name__}: {error}".encode()
            failed = _Error(_Head(ctypes.sizeof(_Error), None), text, INTERNAL)
            return _FROM_STRUCT(frame.contents.api.contents.error_create)(ctypes.addressof(failed))
        return None

    function = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_Frame))(handle)
    _kept.append(function)
    capsule = jax.ffi.pycapsule(ctypes.cast(function, ctypes.c_void_p).value)
    jax.ffi.register_ffi_target(target, capsule, platform=platform, api_version=1)


def _describe(frame: Any) -> None:
    extension = ctypes.cast(frame.head.extension, ctypes.POINTER(_Extension)).contents
    if extension.type != METADATA:
        return
    metadata = ctypes.cast(extension.value, ctypes.POINTER(_Metadata)).contents
    metadata.version.major, metadata.version.minor = frame.api.contents.version.major, frame.api.contents.version.minor
    metadata.traits = RECORDABLE


def _call(frame: Any) -> FfiCall:
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
            raise RuntimeError("XLA provided no CUDA stream")
        return asked.stream or 0

    return FfiCall(name, pointers, stream)


def _text(span: Any) -> str:
    return ctypes.string_at(span.text, span.length).decode()
