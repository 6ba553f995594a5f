"""Progress bar that waits for nothing: it shows the loss of a finished step, and where the time goes."""

import time
from collections.abc import Iterable, Iterator
from typing import Any

from rich.console import Console

from fullstride.process.progress import Progress
from fullstride.step.jax.metrics import Metrics
from fullstride.step.jax.train_step import TrainStep


class MetricsBar:
    """Display of late metrics as they come.

    Attributes:
        line: text next to the bar.

    """

    def __init__(self, step: TrainStep, progress: Progress, every: float):
        self.step, self.line = step, ""
        self._progress, self._every, self._next = progress, every, time.monotonic()

    def show(self, metrics: Metrics) -> None:
        """Show a step's late metrics, at most once in the bar's interval: reading them waits for that step."""
        if not metrics or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + self._every
        loss = metrics["loss"]
        status = f"step {metrics.step} loss {loss if loss.ndim == 0 else loss[-1]:.4g}", str(self.step.report())
        self._progress.status, self.line = status, ", ".join(status)


def tracked(
    batches: Iterable[Any],
    step: TrainStep,
    *,
    total: int | None = None,
    every: float = 0.5,
    console: Console | None = None,
) -> Iterator[tuple[Any, MetricsBar]]:
    """Yield the batches, each with a bar to show the late metrics on: `bar.show(late)`.

    Args:
        batches: what is trained on.
        step: the step whose pace is shown.
        total: number of batches, if `batches` has no length.
        every: seconds between two readings of the loss.
        console: console to draw on; by default stderr.

    """
    if total is None and hasattr(batches, "__len__"):
        total = len(batches)  # pyright: ignore[reportArgumentType]
    with Progress("training", total, console=console) as progress:
        bar = MetricsBar(step, progress, every)
        for done, batch in enumerate(batches, 1):
            yield batch, bar
            progress.at(done)
