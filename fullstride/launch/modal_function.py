"""Function that runs in a Modal container; imported there, and independent of Modal's package."""

import os
from pathlib import Path

from fullstride.launch.attempts import Attempt
from fullstride.launch.container import ENVIRONMENT, RUNS, WORK, begin
from fullstride.launch.processes import torchrun_command
from fullstride.launch.words import Words, resumed

SOURCE = "/root"  # where Modal looks for Python modules
LEAVING = 20.0  # seconds to save when a container is taken away; Modal gives 30


class AttemptFailed(Exception):  # noqa: N818, as Modal shows it
    """Failed attempt that another one can better: Modal's retry policy makes it."""


def attempt(words: Words, launch: str, volume: str, processes: int, seconds: float) -> int:
    """Make one attempt at a command, which resumes the run of an earlier one of the same launch.

    Args:
        words: words of the command.
        launch: name of the launch, the same for every attempt.
        volume: name of the volume of runs.
        processes: number of processes on this machine.
        seconds: time after which it saves and ends; less than Modal's own limit, which kills.

    Returns:
        The exit code, if another attempt would end the same way.

    Raises:
        AttemptFailed: for any other end.

    """
    again = begin(Path(RUNS), launch)
    _commit(volume)
    line = torchrun_command(resumed(words) if again else words, processes=processes, restarts=0)
    path = os.pathsep.join(filter(None, (SOURCE, os.environ.get("PYTHONPATH"))))
    process = Attempt(line, ENVIRONMENT | {"PYTHONPATH": path}, WORK)
    try:
        ended = process.wait(seconds)
    except BaseException:
        # The container is taken away; Modal begins anew elsewhere, without counting a retry.
        process.end(LEAVING)
        raise
    if ended.again:
        raise AttemptFailed(f"exit code {ended.code}: {ended.why}")
    print(f"launch: exit code {ended.code}: {ended.why}", flush=True)  # noqa: T201
    return ended.code


def _commit(volume: str) -> None:
    """Make what was written visible to the next container."""
    import modal

    modal.Volume.from_name(volume).commit()
