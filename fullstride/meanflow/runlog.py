"""A run's folder: its configuration, its metrics as JSON lines, its checkpoints."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fullstride.errors import ConfigError
from fullstride.meanflow.checkpoint import checkpoints
from fullstride.meanflow.config import TrainConfig

METRICS = "metrics.jsonl"


def open_run(config: TrainConfig) -> tuple[Path, Path | None]:
    """The folder of a run, made if need be, and the checkpoint to go on from, if any.

    Raises:
        ConfigError: if the folder holds a run and the configuration says neither resume nor overwrite.

    """
    run = Path(config.output_dir) / config.run_name
    existing = checkpoints(run)
    if config.overwrite and run.exists():
        _remove_run(run)
    elif not config.resume and (existing or (run / METRICS).exists()):
        raise ConfigError(
            f"{run} already holds a run; go on with it (resume=true), replace it (overwrite=true) "
            "or choose another run_name"
        )
    run.mkdir(parents=True, exist_ok=True)
    return run, existing[-1] if config.resume and existing else None


def write_config(run: Path, config: TrainConfig) -> None:
    """Leave the run's configuration in its folder, which marks it as one."""
    (run / "config.json").write_text(json.dumps(asdict(config), indent=1) + "\n")


def _remove_run(run: Path) -> None:
    """Delete an earlier run, but only a folder that this program made."""
    if not (run / "config.json").is_file() and any(run.iterdir()):
        raise ConfigError(
            f"{run} is not empty and holds no run; overwrite=true would delete it: choose another run_name"
        )
    shutil.rmtree(run)


class MetricsLog:
    """metrics.jsonl: one JSON object a line, each with `step`; reopened at a step, it forgets what came after."""

    def __init__(self, run: Path, step: int):
        """Open the log of a run that has made `step` optimizer steps."""
        self.path = run / METRICS
        kept = [line for line in self._lines() if json.loads(line)["step"] <= step]
        self.path.write_text("".join(kept))

    def _lines(self) -> list[str]:
        if not self.path.is_file():
            return []
        # A line that the last run did not finish writing has no newline.
        return [line for line in self.path.read_text().splitlines(keepends=True) if line.endswith("\n")]

    def write(self, step: int, **values: Any) -> None:
        """Append one line."""
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step} | values) + "\n")


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Every line of a run's metrics.jsonl."""
    return [json.loads(line) for line in (run / METRICS).read_text().splitlines()]
