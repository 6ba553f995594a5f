"""Record of a compared run: its clock, its scores, its settings and where it ran."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.run_provenance import expect_recipe, of_run
from fullstride.errors import ConfigError
from fullstride.runs.atomic_files import read_best_effort, replace_file

RECORD = "record.json"
MARKS = 10
# Up to this share floors differ by the rounding of another device; those of another classifier by more.
SAME_FLOOR = 1e-3
# What rounding leaves of a floor of zero, as pictures have that are trained on and scored against.
ZERO = 1e-6


def alike(floors: Sequence[float]) -> bool:
    """Return whether these distances of the same images come from one classifier."""
    return max(floors) - min(floors) <= max(SAME_FLOOR * max(floors), ZERO)


class Record:
    """Record in a run's folder: its clock at each checkpoint and its scores at each mark."""

    def __init__(self, run: Path, minutes: float, recipe: Mapping[str, Any] | None = None):
        """Open the record of a run, or begin one.

        The recipe has every setting that its numbers depend on, by dotted key; None checks nothing. ConfigError
        if the run was begun with another budget or other settings, or does not say with which; if its file is
        not whole.
        """
        self.path = run / RECORD
        known = read_best_effort(self.path) if self.path.is_file() else {}
        fresh = {"minutes": minutes, "startup": None, "saved": {}, "marks": [], "moments": [], "final": {}}
        self._fresh = fresh | ({"recipe": dict(recipe)} if recipe else {})
        if recipe and known.get("marks") and "recipe" not in known:
            raise ConfigError(f"{run}: its settings are not recorded; give another --runs")
        self.values: dict[str, Any] = self._fresh | known
        if self.values["minutes"] != minutes:
            raise ConfigError(
                f"--minutes {minutes:g}: {run} was begun with {self.values['minutes']:g}; give that or another --runs"
            )
        expect_recipe(self.values, recipe or {}, run)

    def begin_anew(self) -> int:
        """Start without checkpoints; keep earlier scores until there are as many new ones.

        Return the number of marks that an earlier process had scored.
        """
        earlier = {key: value for key, value in best(self.values).items() if key != "before"}
        self.values = self._fresh | ({"before": earlier} if earlier["marks"] else {})
        return len(earlier["marks"])

    def go_on_from(self, step: int) -> tuple[float, float | None]:
        """Seconds of training at a checkpoint and of the start-up; scores that come after it are forgotten; ConfigError
        if there was no such checkpoint.
        """
        if step and str(step) not in self.values["saved"]:
            raise ConfigError(f"{self.path}: has no entry for step {step}; delete the run's folder and start again")
        seconds = self.values["saved"][str(step)] if step else 0.0
        for scored in ("marks", "moments"):  # by the clock: steps may have been taken back
            self.values[scored] = [one for one in self.values[scored] if one["seconds"] <= seconds]
        return seconds, self.values["startup"] if step else None

    def rest_on(self, floor: dict[str, float]) -> None:
        """Keep what training images score, beside which all scores of the run stand; ConfigError if the run has scores
        by another classifier, or of distances that are not asked for now.
        """
        for name, known in self.values.setdefault("floor", floor).items():
            if name not in floor:
                raise ConfigError(
                    f"{self.path}: has scores of {name}, which was not requested now; use the same evaluation.features"
                )
            if not alike((known, floor[name])):
                raise ConfigError(
                    f"{self.path}: {name} of training images is {floor[name]:.4g}, expected {known:.4g} "
                    "as in earlier scores: the classifier differs; use the earlier $FULLSTRIDE_CACHE/reference"
                )

    @property
    def trained(self) -> bool:
        """Return whether the budget is used up, so that the last mark is stored."""
        return len(self.values["marks"]) >= MARKS

    def write(self) -> None:
        """Write the record."""
        if best(self.values) is self.values:
            self.values.pop("before", None)
        replace_file(self.path, json.dumps(self.values, indent=1) + "\n")

    def write_work(self) -> None:
        """Write the record with this process's code and machine, while clocks are paused, because that takes time."""
        self.values |= of_run(self.values)
        self.write()


def best(values: dict[str, Any]) -> dict[str, Any]:
    """Return this record or the previous one, whose checkpoints are gone: the one with more marks."""
    before = values.get("before")
    return before if before and len(before["marks"]) > len(values["marks"]) else values
