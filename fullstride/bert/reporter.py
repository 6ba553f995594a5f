"""Where a run's numbers go: metrics.jsonl, and a line for people."""

import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from fullstride.bert.evaluate import Scores
from fullstride.bert.optimizer import learning_rate
from fullstride.bert.settings import TrainSettings
from fullstride.runlog import MetricsLog, has_evaluation
from fullstride.step.jax import Metrics, TrainStep


class Reporter:
    """Reports steps and evaluations; a context, which shows a bar on a terminal, and lines where there is none."""

    def __init__(
        self,
        settings: TrainSettings,
        run: Path,
        step: TrainStep,
        done: int,
        console: Console | None = None,
        skipped: int = 0,
    ):
        """Open the log of a run that has made `done` steps, of which so many were skipped."""
        self.settings, self.step, self.run = settings, step, run
        self.log = MetricsLog(run, done)
        self.console = console or Console()
        self.bar = Progress(
            BarColumn(),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            TimeRemainingColumn(table_column=Column(no_wrap=True)),
            TextColumn("{task.fields[line]}"),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self.task = self.bar.add_task("", total=settings.steps, completed=done, line="")
        self._late: list[Metrics] = []
        self._reported, self._skipped = done, skipped
        self._clock = time.perf_counter()

    def __enter__(self) -> "Reporter":
        """Show the bar; time counts from here."""
        self.bar.start()
        self._clock = time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        """Leave the bar as it is."""
        self.bar.stop()

    def late(self, metrics: Metrics) -> None:
        """Take a step's metrics; every `log_every` steps, and at the last, they are read and reported.

        Those of a step that was taken before are passed over.
        """
        last = self._late[-1].step if self._late else self._reported
        if metrics.step <= last:
            return
        self._late.append(metrics)
        self.bar.update(self.task, completed=metrics.step)
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
        line = (
            f"loss {values['loss']:.3f}, accuracy {values['accuracy']:.1%}, "
            f"{values['tokens_per_second']:,.0f} tokens/s, {pace}"
        )
        self._show(number, line)
        self._late, self._reported, self._clock = [], number, time.perf_counter()

    def evaluation(self, number: int, scores: Scores) -> None:
        """Report an evaluation, whose time is not a step's."""
        self.log.write(number, evaluation=scores.values())
        self.console.print(f"step {number}: {scores}", markup=False, highlight=False, soft_wrap=True)
        self._clock = time.perf_counter()

    def has_evaluation(self, number: int) -> bool:
        """Whether an evaluation after that step was reported."""
        return has_evaluation(self.run, number)

    def _show(self, number: int, line: str) -> None:
        if self.console.is_terminal:
            self.bar.update(self.task, line=line)
        else:
            total = self.settings.steps
            self.console.print(f"step {number}/{total}: {line}", markup=False, highlight=False, soft_wrap=True)
