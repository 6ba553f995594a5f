"""Description of a run for trackers, and the identifier by which a tracker knows it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullstride.runs.atomic_files import replace_file


@dataclass(frozen=True)
class TrackedRun:
    """Run whose numbers are tracked.

    Attributes:
        project: the group of runs.
        name: the run in its group.
        folder: the run's folder.
        config: settings, which some trackers show; config.json in the run's folder has them, too.
        step: optimizer steps that the run has made; above 0 it goes on with its earlier curves.
        steps: optimizer steps of the whole run.

    """

    project: str
    name: str
    folder: Path
    config: dict[str, Any]
    step: int = 0
    steps: int = 0

    def known_as(self, tracker: str) -> str | None:
        """Return the identifier that a tracker gave this run; None for one that starts afresh."""
        path = self.folder / f"{tracker}.id"
        return path.read_text().strip() if self.step and path.is_file() else None

    def remember(self, tracker: str, identifier: str) -> None:
        """Keep the identifier in the run's folder."""
        replace_file(self.folder / f"{tracker}.id", identifier + "\n")
