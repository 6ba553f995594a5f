"""A process that another one has launched ends when that one is gone, however it went, on Linux."""

import contextlib
import ctypes
import os
import signal
import sys

from fullstride.files import note

# The launcher's process id, for the process that it starts.
LAUNCHER = "FULLSTRIDE_LAUNCHER"
PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def end_with_launcher() -> None:
    """From here on the launcher's end is a SIGTERM to this process, which saves and leaves.

    Nothing happens where nobody said that he launched it, or somebody else started it on his behalf, as torchrun does.
    """
    given = os.environ.pop(LAUNCHER, "")
    if not given.isdigit() or sys.platform != "linux":
        return
    launcher = int(given)
    if os.getppid() == launcher:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != launcher and not _lives(launcher):  # it went before it could be asked for
        note("whoever launched this command is gone; nothing was begun")
        raise SystemExit(0)


def _lives(process: int) -> bool:
    with contextlib.suppress(PermissionError):
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return False
    return True
