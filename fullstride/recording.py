"""What recording a CUDA graph asks of the process."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def nothing_collected() -> Iterator[None]:
    """The garbage collector waits: a dead CUDA graph that it finds breaks the one that is recorded (pytorch#161037)."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
