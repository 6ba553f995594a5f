"""torchrun in this process, with the exit code of the processes that it started, and one line instead of a traceback.

`python -m fullstride.launch.elastic` takes torchrun's options.
"""

import logging
import os
import signal
import subprocess
import sys
from typing import Any, ClassVar

from fullstride.errors import one_line
from fullstride.launch.attempts import REASONS, SAVING
from fullstride.process import exit_codes
from fullstride.runs.atomic_files import note


class _Process(subprocess.Popen):
    """Process of a rank. torchrun drops the exit codes of those that it stops; they are needed here."""

    of_rank: ClassVar[dict[str, subprocess.Popen]] = {}

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        if rank := (options.get("env") or {}).get("RANK"):
            self.of_rank[rank] = self


def stopped(number: int, codes: dict[str, int | None]) -> int:
    """Say how the processes ended that torchrun has stopped.

    Args:
        number: signal that torchrun received.
        codes: exit code of each rank; None if it did not end.

    Returns:
        Exit code of the first rank that failed, if one did.

    """
    name = signal.Signals(number).name
    bad = {rank: code for rank, code in codes.items() if code}
    if not codes or None in codes.values():
        note(f"launch: {name}: not all processes ended within {SAVING:g} s")
        return exit_codes.FAILED
    rank, code = next(iter(bad.items()), ("", exit_codes.DONE))
    if bad:
        note(f"launch: {name}: rank {rank} ended with exit code {code}: {REASONS.get(code, 'see its last lines')}")
    else:
        note(f"launch: {name}: all {len(codes)} processes have ended with exit code 0")
    return 128 - code if code < 0 else code


def main() -> int:
    """Run torchrun with this process's arguments; return the exit code."""
    subprocess.Popen = _Process  # before torchrun's modules take the name
    # A save may take longer than the 30 s after which torchrun kills; older releases have no such variable.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", f"{SAVING:.0f}")
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import parse_args, run

    for name in list(logging.root.manager.loggerDict):  # each has a level of its own
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.ERROR)
    options = parse_args(sys.argv[1:])
    try:
        run(options)
    except SignalException as error:
        return stopped(error.sigval, {rank: process.poll() for rank, process in _Process.of_rank.items()})
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode
        note(f"launch: rank {rank} ended with exit code {code}: {REASONS.get(code, 'see its last lines')}")
        return 128 - code if code < 0 else code
    except RendezvousError as error:
        note(f"launch: the machines did not meet at {options.rdzv_endpoint}: {one_line(error)}")
        return exit_codes.FAILED
    return exit_codes.DONE


if __name__ == "__main__":
    raise SystemExit(main())
