"""One process a run or a folder: locks that the system takes back however a process ends."""

import errno
import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fullstride.errors import ConfigError

LOCK = ".lock"
FLOCK = "hhqqi4x"  # struct flock of Linux
TAKEN = (errno.EACCES, errno.EAGAIN)
_held: dict[Path, int] = {}


def hold(run: Path) -> None:
    """Keep other processes out of a run's folder; do nothing if the file system has no locks.

    Raises:
        ConfigError: if another process holds it.

    """
    release(run)  # a lock belongs to the process and goes with any of its open files of that path
    try:
        file = os.open(run / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError:
        return  # what else is written there will say why
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(file)
        if error.errno in TAKEN:
            raise ConfigError(
                f"{run}: another process is training this run; wait for its end, or choose another run_name"
            ) from None
    else:
        _held[run.absolute()] = file


def release(run: Path) -> None:
    """Release the lock of `hold`."""
    if (file := _held.pop(run.absolute(), None)) is not None:
        os.close(file)


def holder(run: Path) -> int | None:
    """Return the process that holds a run's folder by `hold`, without touching its lock; None if there is none.

    A process of another machine is 0. Of a file system without locks nobody knows: None.
    """
    if run.absolute() in _held:  # to open the file again, and close it, would release the lock
        return os.getpid()
    try:
        file = os.open(run / LOCK, os.O_RDONLY)
    except OSError:
        return None
    try:
        asked = struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, *_, pid = struct.unpack(FLOCK, fcntl.fcntl(file, fcntl.F_GETLK, asked))
    except OSError:
        return None
    finally:
        os.close(file)
    return None if kind == fcntl.F_UNLCK else max(0, pid)


@contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Lock a folder; False if somebody else holds its lock, True if not or if the file system has no locks.

    It is another lock than that of `hold`, and excludes other threads and uses of the same process, too.
    """
    descriptor, alone = os.open(folder, os.O_RDONLY), True
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            alone = error.errno not in TAKEN
        yield alone
    finally:
        with suppress(OSError):  # of a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a process that was forked meanwhile has it open, too
        os.close(descriptor)
