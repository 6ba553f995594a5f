"""The command line's output: neither a reader that left nor a character that cannot be shown ends a command."""

import io
import os
import sys
from typing import Any


class _Descriptor(io.FileIO):
    """A file that goes on as /dev/null when its reader has left, as `head` does."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self.fileno())
            return memoryview(data).nbytes


def _lasting(stream: io.TextIOWrapper) -> io.TextIOWrapper:
    stream.flush()
    raw = _Descriptor(stream.fileno(), "wb", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(raw) if isinstance(stream.buffer, io.BufferedWriter) else raw,  # python -u has no buffer
        encoding=stream.encoding,
        errors="replace",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def outlive_readers() -> None:
    """Let a command run to its end, with the exit code of its work, if nobody reads what it prints."""
    for name in ("stdout", "stderr"):
        if isinstance(stream := getattr(sys, f"__{name}__"), io.TextIOWrapper):  # None if it is closed
            lasting = _lasting(stream)
            setattr(sys, name, lasting)
            setattr(sys, f"__{name}__", lasting)
