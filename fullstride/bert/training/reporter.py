"""Outputs of a run's numbers: metrics.jsonl, a tracker, and a line on the console."""

import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from fullstride.bert.training.evaluate import Scores
from fullstride.bert.training.optimizer import learning_rate
from fullstride.bert.training.settings import TrainSettings
from fullstride.process.progress import Progress
from fullstride.runs.folder import MetricsLog
from fullstride.runs.state import state_of
from fullstride.runs.trackers.tracked_run import TrackedRun
from fullstride.runs.trackers.tracker import open_tracker
from fullstride.step.jax import Metrics, TrainStep


class Reporter:
    """Reports steps and evaluations; a context, which shows its progress."""

    def __init__(
        self,
        settings: TrainSettings,
        run: Path,
        step: TrainStep,
        done: int,
        console: Console | None = None,
        skipped: int = 0,
    ):
        """Open the log and the tracker of a run that has made `done` steps, of which so many were skipped.

        Raises:
            ConfigError: if the tracker is not installed or cannot be opened.

        """
        self.settings, self.step, self.run = settings, step, run
        self.log = MetricsLog(run, done)
        tracked = TrackedRun(settings.project, settings.run_name, run, asdict(settings), done, settings.steps)
        self.tracker = open_tracker(settings.track, tracked)
        self.console = console or Console()
        self.progress = Progress("training", settings.steps, done, console=self.console)
        self._late: list[Metrics] = []
        self._reported, self._skipped = done, skipped
        self._clock = time.perf_counter()

    def __enter__(self) -> "Reporter":
        """Show the bar; time counts from here."""
        self.progress.__enter__()
        self._clock = time.perf_counter()
        return self

    def __exit__(self, *error: Any) -> None:
        """Leave the bar as it is, and the tracker with everything written."""
        self.progress.__exit__(*error)
        self.tracker.close(state_of(error[1]))

    def late(self, metrics: Metrics) -> None:
        """Take a step's metrics; every `log_every` steps, and at the last, they are read and reported.

        Those of a step that was taken before are passed over.
        """
        last = self._late[-1].step if self._late else self._reported
        if metrics.step <= last:
            return
        self._late.append(metrics)
        self.progress.at(metrics.step)
        if metrics.step % self.settings.log_every == 0 or metrics.step == self.settings.steps:
            self._report(metrics.step)

    def _report(self, number: int) -> None:
        # Reading waits for that step, while the one after it runs.
        data, skips = self.settings.data, [bool(metrics.get("skipped", False)) for metrics in self._late]
        # What a skipped step measured need not be finite, and moved nothing.
        made = [metrics for metrics, skip in zip(self._late, skips, strict=True) if not skip] or self._late
        names = [name for name in self._late[-1] if name != "skipped"]
        values = {name: float(np.mean([metrics[name] for metrics in made])) for name in names}
        pace, seconds = self.step.report(), (time.perf_counter() - self._clock) / len(self._late)
        # A skipped step leaves the optimizer, and with it the schedule, where it was.
        taken = number - 1 - self._skipped - sum(skips[:-1])
        self._skipped += sum(skips)
        values |= {
            "lr": float(learning_rate(self.settings.optimizer, self.settings.steps, taken, np)),
            "seconds_per_step": seconds,
            "tokens_per_second": data.batch_size * data.length / seconds,
            "host_ms": pace.host_ms,
            "total_ms": pace.total_ms,
            "hidden": pace.hidden,
        }
        if "skipped" in self._late[-1]:
            values["skipped_steps"] = sum(skips)
        self.log.write(number, **values)
        tracked = values | {"rows_per_second": data.batch_size / seconds}
        if stats := jax.devices()[0].memory_stats():
            tracked["device_memory_bytes"] = stats["peak_bytes_in_use"]
        self._track(number, "train", tracked)
        self.progress.status = (
            f"loss {values['loss']:.3f}",
            f"accuracy {values['accuracy']:.1%}",
            f"{values['tokens_per_second']:,.0f} tokens/s",
            str(pace),
        )
        self._late, self._reported, self._clock = [], number, time.perf_counter()

    def evaluation(self, number: int, scores: Scores) -> None:
        """Report an evaluation, whose time is not a step's."""
        self.log.write(number, evaluation=asdict(scores))
        self._track(number, "eval", asdict(scores))
        self.console.print(f"step {number}: {scores}", markup=False, highlight=False, soft_wrap=True)
        self._clock = time.perf_counter()

    def _track(self, number: int, group: str, values: dict[str, float]) -> None:
        # A skipped step's loss may be no number, which not every tracker takes.
        finite = {f"{group}/{name}": value for name, value in values.items() if math.isfinite(value)}
        self.tracker.log(number, finite)
