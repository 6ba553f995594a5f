"""One process a run: a lock that the system takes back however a process ends."""

import errno
import fcntl
import os
from pathlib import Path

from fullstride.errors import ConfigError

LOCK = ".lock"
_held: dict[Path, int] = {}


def hold(run: Path) -> None:
    """Keep other processes out of a run's folder; where the file system has no locks, nothing happens.

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
        if error.errno in (errno.EACCES, errno.EAGAIN):
            raise ConfigError(
                f"{run}: another process is training this run; wait for its end, or choose another run_name"
            ) from None
    else:
        _held[run.absolute()] = file


def release(run: Path) -> None:
    """Let others in."""
    if (file := _held.pop(run.absolute(), None)) is not None:
        os.close(file)
