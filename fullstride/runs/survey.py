"""Survey of run folders: what each is, how far it came, why it ended, what it holds."""

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from fullstride.errors import ConfigError
from fullstride.runs.atomic_files import file_size
from fullstride.runs.early_ends import read_ends
from fullstride.runs.folder import METRICS, kind_of, remove_folder, run_config
from fullstride.runs.lock import hold, holder, release
from fullstride.runs.state import STATE

TAIL = 1 << 16  # bytes of metrics.jsonl that are read
KILLED = "its process ended without a word: killed, or the machine went down"


@dataclass(frozen=True)
class RunSummary:
    """Summary of a run.

    Attributes:
        folder: the run's folder.
        workload: meanflow or bert; None for one of an unknown version.
        state: running, finished, stopped, failed; unknown for a run of an earlier version.
        why: reason of its end; empty for one that ended as it should.
        exit_code: exit code of its process; None while it runs, or if nobody knows.
        step: optimizer steps made.
        steps: optimizer steps of the whole run; None for a run of an earlier version.
        metrics: numbers of its last line of metrics.jsonl.
        evaluation: its last evaluation.
        size: bytes of its files.
        changed: time of its last line or end, in seconds since 1970.

    """

    folder: Path
    workload: str | None
    state: str
    why: str
    exit_code: int | None
    step: int
    steps: int | None
    metrics: Mapping[str, float]
    evaluation: Mapping[str, Any]
    size: int
    changed: float


def runs_in(folders: Iterable[Path]) -> list[Path]:
    """Find the runs among folders and below them.

    Raises:
        ConfigError: for a folder that does not exist.

    """
    return sorted({run for folder in folders for run in _below(folder)})


def _below(folder: Path) -> Iterator[Path]:
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder; expected a run's, or one with runs in it")
    for place, folders, _ in os.walk(folder):
        if run_config(Path(place)):
            folders.clear()
            yield Path(place)
        folders[:] = [name for name in folders if not name.startswith(".")]


def _tail(run: Path) -> list[dict[str, Any]]:
    """The last lines of metrics.jsonl, without any that is damaged."""
    try:
        with (run / METRICS).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
            lines = file.read().split(b"\n")
    except OSError:
        return []
    found = []
    for line in lines:
        with suppress(ValueError):
            found += [read] if isinstance(read := json.loads(line), dict) and "step" in read else []
    return found


def _recorded(run: Path) -> dict[str, Any]:
    try:
        found = json.loads((run / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _ended(run: Path, kept: dict[str, Any]) -> tuple[str, str, int | None]:
    """State, reason and exit code."""
    if holder(run) is not None:
        return "running", "", None
    if kept.get("state") not in (None, "running"):
        return kept["state"], kept.get("why", ""), kept.get("exit_code")
    began = kept.get("began", 0.0)
    with suppress(OSError, ValueError, KeyError):
        for end in reversed(read_ends(run)):
            if datetime.fromisoformat(end["time"]).timestamp() >= int(began):
                return "failed", f"{end['reason']}: {end['message']}", end["exit_code"]
    return ("failed", KILLED, None) if kept else ("unknown", "", None)


def summary(run: Path) -> RunSummary:
    """Summary of a run's folder."""
    kept, lines = _recorded(run), _tail(run)
    state, why, code = _ended(run, kept)
    numbers = [{k: v for k, v in line.items() if isinstance(v, int | float)} for line in lines]
    scored = [line["evaluation"] for line in lines if isinstance(line.get("evaluation"), dict)]
    trained = [line for line in numbers if "loss" in line]
    paths = [run / name for name in (METRICS, STATE) if (run / name).exists()] or [run]
    return RunSummary(
        folder=run,
        workload=kind_of(run_config(run)),
        state=state,
        why=why,
        exit_code=code,
        step=int(max([line["step"] for line in numbers] + [kept.get("step", 0)])),
        steps=kept.get("steps"),
        metrics=trained[-1] if trained else {},
        evaluation=scored[-1] if scored else {},
        size=file_size(run),
        changed=max(path.stat().st_mtime for path in paths),
    )


def remove_run(run: Path) -> None:
    """Remove a run's folder, unless its lock is held; of a link to it, both.

    Raises:
        ConfigError: if a process is training it, or the folder holds no run.

    """
    if not run_config(run):
        raise ConfigError(f"{run}: holds no run, and is left as it is")
    hold(run)
    try:
        remove_folder(run.resolve())
    finally:
        release(run)
    if run.is_symlink():
        run.unlink()


def is_older(found: RunSummary, days: float) -> bool:
    """Return whether a run's last line or end is so many days ago."""
    return time.time() - found.changed >= 86400 * days
