"""Outputs of a run's numbers: metrics.jsonl, a tracker, the progress bar."""

import math
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fullstride.errors import ConfigError
from fullstride.meanflow.config.schema import TrainConfig
from fullstride.meanflow.training.guard import GuardCounts
from fullstride.meanflow.training.state import Position
from fullstride.process.progress import Progress
from fullstride.runs.atomic_files import note
from fullstride.runs.folder import MetricsLog, has_evaluation
from fullstride.runs.state import state_of
from fullstride.runs.trackers.tracked_run import TrackedRun
from fullstride.runs.trackers.tracker import Tracker, open_tracker


class Reporter:
    """Reports the steps and evaluations of one run; a context, which shows the bar and closes the tracker."""

    def __init__(
        self,
        config: TrainConfig,
        run: Path,
        step: int,
        total_steps: int,
        judged: GuardCounts | None = None,
        *,
        enabled: bool = True,
    ):
        """Open everything for a run that has made `step` of `total_steps` steps, of which its guard has `judged` some.

        Of several processes only the first one's is `enabled`; the others' take reports and keep none.

        Raises:
            ConfigError: if the tracker is not installed or cannot be opened.

        """
        self.config = config
        self.run = run
        self.total_steps = total_steps
        self.enabled = enabled
        self._clock = time.perf_counter(), step
        self._judged = judged or GuardCounts()
        if enabled:
            self.log = MetricsLog(run, step)
            self.tracker = self._open_tracker(step)
            self.progress = Progress("training", total_steps, step)

    def _open_tracker(self, step: int) -> Tracker:
        config = self.config
        run = TrackedRun(config.project, config.run_name, self.run, asdict(config), step, self.total_steps)
        return open_tracker(config.track, run)

    def __enter__(self) -> "Reporter":
        """Show the bar; time counts from here."""
        if self.enabled:
            self.progress.__enter__()
        self._clock = time.perf_counter(), self._clock[1]
        return self

    def __exit__(self, *error: Any) -> None:
        """Leave the bar as it is, and the log and the tracker with everything written."""
        if not self.enabled:
            return
        self.progress.__exit__(*error)
        self.log.close()
        self.tracker.close(state_of(error[1]))

    def step(
        self,
        position: Position,
        metrics: dict[str, Tensor],
        rate: Callable[[int], float],
        judge: Callable[[], GuardCounts],
    ) -> None:
        """Report a step: every `log_every`, and the last; the only place where the host waits for the device."""
        if not self.enabled:
            return
        self.progress.at(position.step)
        if position.step % self.config.log_every and position.step != self.total_steps:
            return
        values = {key: value.item() for key, value in metrics.items()}
        batch = self.config.data.batch_size * self.config.gradient_accumulation_steps
        now, (before, last) = time.perf_counter(), self._clock
        self._clock = now, position.step
        values["seconds_per_step"] = (now - before) / max(1, position.step - last)
        values["images_per_second"] = batch / values["seconds_per_step"]
        judged = judge()
        values |= {"lr": rate(position.step - 1), "skipped_steps": judged.skipped, "spikes": judged.spikes}
        self._tell(position.step, judged)
        self.log.write(position.step, epoch=position.epoch, images=position.step * batch, **values)
        if torch.cuda.is_initialized():
            values["device_memory_bytes"] = torch.cuda.max_memory_allocated()
        self._track(position.step, {f"train/{key}": value for key, value in values.items()})
        self.progress.status = (
            f"sq. error {values['squared_error']:.4f}",
            f"{values['images_per_second']:.0f} images/s",
            f"{values['seconds_per_step']:.3g} s/step",
        )

    def _tell(self, step: int, judged: GuardCounts) -> None:
        if judged.skipped > self._judged.skipped:
            where = (
                f"{judged.lost} of them had a loss that was not finite, {judged.skipped - judged.lost} only a gradient"
            )
            note(f"step {step}: {judged.skipped} steps skipped so far because they were not finite: {where}")
        if judged.spikes > self._judged.spikes:
            over = f"{self.config.guard.spike:g} x their running average"
            note(f"step {step}: {judged.spikes} gradients so far exceeded {over} and were scaled to it")
        self._judged = judged

    def evaluation(self, position: Position, scores: dict[str, dict]) -> None:
        """Report the scores of an evaluation, whose time is not a step's."""
        if not self.enabled:
            return
        self.log.write(position.step, epoch=position.epoch, evaluation=scores)
        self._track(position.step, flat_scores(scores))
        self._clock = time.perf_counter(), position.step

    def tangents(self, position: Position, report: dict[str, Any]) -> None:
        """Report the check of du/dt at the start of this process."""
        if not self.enabled:
            return
        self.log.write(position.step, tangents=report)
        self._clock = time.perf_counter(), self._clock[1]

    def has_evaluation(self, step: int) -> bool:
        """Return whether an evaluation after that step was reported."""
        return has_evaluation(self.run, step)

    def restored(self, position: Position, checkpoint: str, harmful_before: int, judged: GuardCounts) -> None:
        """Forget what came after a restored checkpoint, by which so much was judged, and note it."""
        if not self.enabled:
            return
        step, self._judged = position.step, judged
        self.log.go_back(step)
        self.log.write(step, restored=checkpoint, harmful_before_step=harmful_before, attempt=position.attempt)
        self.tracker.close("running")
        try:
            self.tracker = self._open_tracker(step)
        except ConfigError as error:  # as on a full disk: it costs the tracker's numbers and not the training
            note(f"{error}; it is off for the rest of this run; metrics.jsonl is still written")
            self.tracker = Tracker("none", None)
        self.progress.at(step)
        self._clock = time.perf_counter(), step

    def _track(self, step: int, values: dict[str, float]) -> None:
        # A skipped step's loss may be no number, which not every tracker takes.
        self.tracker.log(step, {key: value for key, value in values.items() if math.isfinite(value)})


def flat_scores(scores: dict[str, dict]) -> dict[str, float]:
    """Numbers by name: one step's as `eval/energy_distance`, others as `eval/meanflow 2/energy_distance`."""
    flat: dict[str, float] = {}
    for sampler, score in scores.items():
        prefix = "eval/" if sampler == "meanflow 1" else f"eval/{sampler}/"
        flat |= {prefix + key: value for key, value in _numbers(score)}
    return flat


def _numbers(values: dict[str, Any], prefix: str = "") -> list[tuple[str, float]]:
    found = []
    for key, value in values.items():
        if isinstance(value, dict):
            found += _numbers(value, f"{key}/" if key != "features" else "")
        elif isinstance(value, int | float):
            found.append((prefix + key, float(value)))
    return found
