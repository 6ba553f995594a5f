"""Records read again when what they lie on is away for a moment: a network's disk, or a name server."""

import errno
import time
from collections.abc import Callable
from typing import TypeVar

from fullstride.errors import ReadError, in_a_line
from fullstride.runs.atomic_files import note

T = TypeVar("T")

# Seconds before each of the next tries: 15 in all, which a remounted disk or a server that restarts needs.
WAITS = (0.1, 0.4, 1.5, 4.0, 9.0)
# What a disk says that may be there again soon; on one that is not mounted no file is there.
TRANSIENT = {
    getattr(errno, name)
    for name in (
        "EAGAIN", "EBUSY", "ECOMM", "ECONNABORTED", "ECONNREFUSED", "ECONNRESET", "EHOSTDOWN", "EHOSTUNREACH", "EINTR",
        "EIO", "EMFILE", "ENETDOWN", "ENETRESET", "ENETUNREACH", "ENFILE", "ENODEV", "ENOENT", "ENOLINK", "ENOMEM",
        "ENONET", "ENOTCONN", "ENXIO", "EREMOTEIO", "ESHUTDOWN", "ESTALE", "ETIMEDOUT",
    )
    if hasattr(errno, name)
}  # fmt: skip


def read_again(read: Callable[[], T], origin: Callable[[], str]) -> T:
    """Call `read`, again for some seconds where the disk may come back.

    Args:
        read: raises OSError where the operating system cannot read, and something else for damage.
        origin: names what is read.

    Raises:
        ReadError: if it still cannot be read, or at once for a reason that time does not change, such as its rights.

    """
    for tries, wait in enumerate((*WAITS, None), 1):
        try:
            return read()
        except ReadError:
            raise
        except OSError as error:
            if wait is None or error.errno not in TRANSIENT:
                again = f" at {tries} tries in {sum(WAITS):g} s" if tries > 1 else ""
                raise ReadError(f"{origin()}: cannot be read{again} ({in_a_line(error)})") from None
            if tries == 1:
                note(f"{origin()}: cannot be read ({in_a_line(error)}); it is tried again for {sum(WAITS):g} s")
            time.sleep(wait)
    raise AssertionError  # the last try returns or raises


def refuse_if_away(error: OSError) -> None:
    """Raise for what may be there again soon; a file that is not there, and other things, are let be.

    Raises:
        ReadError: if the disk is away.

    """
    if error.errno in TRANSIENT - {errno.ENOENT}:
        raise ReadError(f"{error.filename}: cannot be read ({in_a_line(error)})") from None
