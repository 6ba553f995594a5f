"""state.json of a run's folder: whether it is running, and how it ended."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fullstride.errors import Preempted, one_line, shortened
from fullstride.process.exit_codes import exit_code_of
from fullstride.runs.atomic_files import note, replace_file

STATE = "state.json"
STATES = ("running", "finished", "stopped", "failed")
LONGEST = 400  # characters of a reason


def state_of(error: BaseException | None) -> str:
    """Return the state of a run that ended with this error: finished, stopped or failed."""
    if error is None:
        return "finished"
    return "stopped" if isinstance(error, Preempted | KeyboardInterrupt) else "failed"


@contextmanager
def record_state(
    run: Path, *, steps: int, made: Callable[[], int], wrong: Callable[[], str] = str, enabled: bool = True
) -> Iterator[None]:
    """Record that a run is running, and, unless its process is killed, how it ended.

    Args:
        run: the run's folder.
        steps: optimizer steps of the whole run.
        made: counts those that it has made.
        wrong: says why a run that made all its steps has failed, or "".
        enabled: False in all but one of the processes that train a run together.

    """
    began = time.time()

    def write(state: str, error: BaseException | None = None) -> None:
        kept: dict[str, Any] = {"state": state, "step": made(), "steps": steps, "began": began, "time": time.time()}
        if state != "running":
            why = shortened(one_line(error), LONGEST) if error else ""
            kept |= {"exit_code": exit_code_of(error), "why": why}
        try:
            replace_file(run / STATE, json.dumps(kept) + "\n")
        except OSError as failed:
            note(f"{failed}; the state of the run is not recorded")

    if not enabled:
        yield
        return
    write("running")
    try:
        yield
    except BaseException as error:
        write(state_of(error), error)
        raise
    why = wrong()
    write("failed" if why else "finished", FloatingPointError(why) if why else None)
