"""Coupling of a launched process to its launcher, on Linux: when the launcher ends, the process is stopped."""

import contextlib
import ctypes
import os
import signal
import sys

from fullstride.process import torchrun as launched
from fullstride.runs.atomic_files import note

# The launcher's process id, for the process that it starts.
LAUNCHER = "FULLSTRIDE_LAUNCHER"
PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def end_with_launcher() -> None:
    """Send this process a SIGTERM when its launcher ends, so that it saves and leaves.

    The launcher is whoever says so in the environment, or torchrun: processes that outlive torchrun would train on
    without one that starts them anew, or wait for each other on their GPUs. Does nothing without a launcher, or if the
    parent is another process.
    """
    given = os.environ.pop(LAUNCHER, "")
    if sys.platform != "linux":
        return
    parent, launcher = os.getppid(), int(given) if given.isdigit() else None
    # Somebody else may set torchrun's other variables, and not wait for this process.
    if parent == launcher or (launched.by_torchrun() and "TORCHELASTIC_RUN_ID" in os.environ):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    # It may have gone before it could be asked for.
    if os.getppid() != parent or (launcher is not None and not _lives(launcher)):
        note("the launcher of this command has ended; nothing was started")
        raise SystemExit(0)


def _lives(process: int) -> bool:
    with contextlib.suppress(PermissionError):
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return False
    return True
