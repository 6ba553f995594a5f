"""A run's folder: its configuration, its metrics as JSON lines, its checkpoints, its workload."""

import itertools
import json
import math
import shutil
from collections.abc import Mapping, Set
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from fullstride.errors import ConfigError
from fullstride.runs.atomic_files import note, replace_file
from fullstride.runs.lock import LOCK, hold
from fullstride.settings.overrides import flat

CONFIG = "config.json"
TITLES = {"meanflow": "MeanFlow", "bert": "BERT"}
# A key that each workload's configuration has, and no other's.
MARKS = {"meanflow": "epochs", "bert": "steps"}


def run_config(folder: Path) -> dict[str, Any]:
    """The configuration that a run left in its folder, empty without one: weights have a config.json, too."""
    try:
        found = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) and {"output_dir", "run_name"} <= found.keys() else {}


def kind_of(config: Mapping[str, Any]) -> str | None:
    """The workload that a run's configuration is of: a name in `TITLES`, or None."""
    return next((kind for kind, mark in MARKS.items() if mark in config), None)


def check_kind(run: Path, kind: str | None) -> None:
    """Raise if `run` belongs to another workload than `kind`; None is an unknown one.

    Raises:
        ConfigError: naming the folder and both workloads.

    """
    found = kind_of(run_config(run))
    if found is None or kind is None or found == kind:
        return
    raise ConfigError(f"{run} is a {TITLES[found]} run, not a {TITLES[kind]} run; expected another folder or run_name")


METRICS = "metrics.jsonl"
# How to continue a stopped run of a command that finds out by itself where it was.
SAME_COMMAND = "run the same command"
REMOVING = ".removing_"


@runtime_checkable
class RunLocation(Protocol):
    """Fields of a configuration that determine a run's folder."""

    output_dir: str
    run_name: str
    resume: bool
    overwrite: bool


def folder_of(config: RunLocation) -> Path:
    """The folder of a run."""
    return Path(config.output_dir) / config.run_name


def open_folder(config: RunLocation) -> Path:
    """The folder of a run, output_dir/run_name, created if needed; this process alone may write there.

    Raises:
        ConfigError: if the folder holds a run and the configuration says neither resume nor overwrite, if it holds a
            run of another workload and the configuration does not say overwrite, if it holds something else with a
            configuration of its own, such as weights, or if another process is training it.

    """
    run = folder_of(config)
    if (run / CONFIG).is_file() and not run_config(run):
        raise ConfigError(f"{run / CONFIG} was not written by a run and would be overwritten; choose another run_name")
    if not config.overwrite:
        check_kind(run, kind_of(vars(config)))
    if run.exists() and not run.is_dir():
        raise ConfigError(f"{run} is a file, expected a run's folder or nothing there; choose another run_name")
    if config.overwrite and run.exists():
        _remove_run(run)
    elif not config.resume and (any((run / "checkpoints").glob("*")) or (run / METRICS).exists()):
        raise ConfigError(
            f"{run} already holds a run; continue it (resume=true), replace it (overwrite=true) "
            "or choose another run_name"
        )
    try:
        run.resolve().mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"output_dir={config.output_dir}: cannot make {run} ({error.strerror})") from None
    hold(run)
    return run


def how_to_resume(config: RunLocation) -> str:
    """Advice for a person whose run was stopped, as the end of a sentence."""
    # With both, overwrite=true would delete what was saved.
    return f"{SAME_COMMAND} with resume=true" + (" in place of overwrite=true" if config.overwrite else "")


def write_config(run: Path, config: Any) -> None:
    """Leave the run's configuration in its folder, which marks it as one."""
    replace_file(run / CONFIG, json.dumps(asdict(config), indent=1) + "\n")


def _remove_run(run: Path) -> None:
    """Delete an earlier run, but only a folder that this program made."""
    if not (run / CONFIG).is_file() and any(path.name != LOCK for path in run.iterdir()):
        raise ConfigError(
            f"{run} is not empty and holds no run; overwrite=true would delete it: choose another run_name"
        )
    hold(run)
    remove_folder(run.resolve())  # a link, as to a larger disk, stays


def remove_folder(folder: Path) -> None:
    """Remove a folder, renamed first: a kill in the middle must not leave half of it under this name."""
    hidden = folder.with_name(REMOVING + folder.name)
    shutil.rmtree(hidden, ignore_errors=True)
    shutil.rmtree(folder.rename(hidden), ignore_errors=True)


def has_evaluation(run: Path, step: int) -> bool:
    """Return whether the metrics of a run have an evaluation after that step."""
    return any("evaluation" in line for line in read_metrics(run) if line["step"] == step)


def _step(line: str | bytes) -> float:
    """The step of a line, or infinity if it is none that this program wrote, as after a crash of the machine."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def _plain(value: Any) -> Any:
    """The value as JSON has it: numbers that are not finite become null."""
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


class MetricsLog:
    """metrics.jsonl: one JSON object a line, each with `step`; reopened at a step, it forgets what came after.

    A line that a full disk refuses is held back and written with the next.
    """

    def __init__(self, run: Path, step: int):
        """Open the log of a run that has made `step` optimizer steps."""
        self.path = run / METRICS
        kept = "".join(line for line in self._lines() if _step(line) <= step)
        replace_file(self.path, kept)
        self._end, self._waiting = len(kept.encode()), ""

    def _lines(self) -> list[str]:
        if not self.path.is_file():
            return []
        # A line that the last run did not finish writing has no newline.
        return [line for line in self.path.read_text(errors="replace").splitlines(keepends=True) if line.endswith("\n")]

    def write(self, step: int, **values: Any) -> None:
        """Append one line."""
        self._waiting += json.dumps(_plain({"step": step} | values)) + "\n"
        if error := self._refused():
            note(f"{self.path}: {error}; the line is held back and written with the next one")

    def _refused(self) -> OSError | None:
        """Append the lines held back; print the reason if that fails."""
        try:
            with self.path.open("r+b") as file:
                file.truncate(self._end)  # a write that failed may have left half a line
                file.seek(self._end)
                file.write(self._waiting.encode())
        except OSError as error:
            return error
        self._end += len(self._waiting.encode())
        self._waiting = ""
        return None

    def go_back(self, step: int) -> None:
        """Forget all lines after a step; those before it that wait go on waiting. Takes no room on the disk."""
        self._waiting = "".join(line for line in self._waiting.splitlines(keepends=True) if _step(line) <= step)
        try:
            # Behind its end the file may hold part of what waits.
            lines = self.path.read_bytes()[: self._end].splitlines(keepends=True)
        except OSError as error:
            note(f"{self.path}: {error}; lines after step {step} may remain in it")
            return
        kept = itertools.takewhile(lambda line: _step(line) <= step, lines)
        self._end = sum(map(len, kept))
        if error := self._refused():
            note(f"{self.path}: {error}; lines after step {step} are removed with the next write")

    def close(self) -> None:
        """Write the lines held back, or print that they are lost."""
        if self._waiting and (error := self._refused()):
            lines = self._waiting.count("\n")
            note(f"{self.path}: {error}; the last {lines} lines could not be written and are lost")


def numbered(lines: list[dict[str, Any]], metric: str) -> list[dict[str, Any]]:
    """The lines in which a metric is a number; it is null where it was infinite or none."""
    return [line for line in lines if line.get(metric) is not None]


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Every line of a run's metrics.jsonl, without one at its end that is being written."""
    whole, _, _ = (run / METRICS).read_text(encoding="utf-8").rpartition("\n")
    return [json.loads(line) for line in whole.split("\n") if line]


# Keys and groups of every workload: how often, where to and from, how it is scored; never what is learned.
FREE = {
    "data.path", "eval_every", "evaluation", "keep", "log_every", "output_dir", "overwrite", "project", "resume",
    "run_name", "save_every", "track",
}  # fmt: skip


def setting_changes(saved: Mapping[str, Any], wanted: Mapping[str, Any], free: Set[str]) -> dict[str, str]:
    """The keys that keep a run of `saved` from resuming with `wanted`, each with both values, as in `0 -> 1`.

    Args:
        saved: nested settings of the saved run.
        wanted: nested settings to resume with.
        free: keys and groups that may change.

    """
    old, new = dict(flat(saved)), dict(flat(wanted))
    kept = [key for key in old | new if not {key, key.split(".")[0]} & free]
    return {key: f"{old.get(key)} -> {new.get(key)}" for key in kept if old.get(key) != new.get(key)}


def refuse(place: Path, found: Mapping[str, str], what: str = "settings") -> None:
    """Refuse to resume with other settings, or other data.

    Raises:
        ConfigError: naming every key that differs, with both values, if there is one.

    """
    if found:
        named = ", ".join(f"{key}: {values}" for key, values in found.items())
        raise ConfigError(f"{place}: cannot resume with other {what} ({named}); use another run_name")
