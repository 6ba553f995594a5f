"""Outcome of a run that made all its steps: whether its last numbers are numbers."""

from pathlib import Path

from fullstride.meanflow.checkpoints.folder import checkpoints, read_manifest
from fullstride.runs.folder import read_metrics


def not_finite(run: Path) -> str:
    """Return which of a finished run's last numbers are not finite, or ""."""
    made = checkpoints(run)
    if harmful := read_manifest(made[-1]).get("harmful") if made else 0:
        return f"its last {harmful} steps were not finite"
    return "its last squared error is not finite" if last_error(run) is None else ""


def last_error(run: Path) -> float | None:
    """Return the last squared error of a run; None if it was no number, 0 if none was written."""
    trained = [line for line in read_metrics(run) if "squared_error" in line]
    return trained[-1]["squared_error"] if trained else 0.0
