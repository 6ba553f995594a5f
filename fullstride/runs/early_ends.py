"""ends.jsonl of a run's folder: why an attempt at it ended early, one JSON object a line, oldest first."""

import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fullstride.process import torchrun
from fullstride.runs.atomic_files import note

ENDS = "ends.jsonl"


def write_end(run: Path, *, reason: str, message: str, step: int, exit_code: int) -> None:
    """Append one line; if it cannot be written, print that on stderr.

    Args:
        run: the run's folder.
        reason: one of no_step, no_checkpoint, gpu_idle, out_of_memory, read_error.
        message: text for people.
        step: number of optimizer steps made.
        exit_code: exit code of the process; see `fullstride.process.exit_codes`.

    """
    told = {"reason": reason, "message": message, "step": step, "exit_code": exit_code}
    time = datetime.now(UTC).isoformat(timespec="seconds")
    line = json.dumps({"time": time, **told, "process": torchrun.rank(), "pid": os.getpid()}) + "\n"
    try:
        # One write to the file's end: processes that train together may end in the same moment.
        file = os.open(run / ENDS, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(file, line.encode())
        finally:
            os.close(file)
    except OSError as error:
        note(f"{run / ENDS}: {error}; not written: {line.strip()}")


def read_ends(run: Path) -> list[dict[str, Any]]:
    """Every line of a run's ends.jsonl; none if no attempt ended early."""
    path = run / ENDS
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
