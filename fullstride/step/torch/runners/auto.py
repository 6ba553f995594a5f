"""`auto`: the backends are measured by the first steps of the training itself, and the fastest one goes on."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from fullstride.step.torch.body import Body, Look, Metrics
from fullstride.step.torch.runners.expected_shapes import Usual
from fullstride.step.torch.runners.graph import WARM
from fullstride.step.torch.runners.interface import Runner

# Steps of a candidate before those that count: those before a record, the record itself, its first replays.
UNCOUNTED, COUNTED = WARM + 3, 8


class Measured:
    """Gives each candidate some steps and stays with the fastest. Each is a whole step of the training: none is lost.

    Attributes:
        name: the backend of the next step.
        milliseconds: medians of those measured.
        refused: why others were not.

    """

    def __init__(
        self,
        candidates: dict[str, Callable[[], Runner]],
        device: torch.device,
        usual: Usual,
        agree: Callable[[float], float] = lambda ms: ms,
    ):
        """Take what makes each candidate, which batches count, and what makes of a time that of all processes."""
        self._usual, self._agree = usual, agree
        self._makers, self._waiting, self._device = candidates, list(candidates), device
        self.milliseconds: dict[str, float] = {}
        self.refused: dict[str, str] = {}
        self._chosen = False
        self._next()

    @property
    def chosen(self) -> bool:
        """Whether all were measured."""
        return self._chosen

    def __str__(self) -> str:
        """What was chosen, and why."""
        times = ", ".join(f"{name} {ms:.2f} ms" for name, ms in sorted(self.milliseconds.items(), key=lambda x: x[1]))
        return f"backend=auto: {self.name} ({'; '.join([times, *(f'{n}: {why}' for n, why in self.refused.items())])})"

    def _next(self) -> None:
        self.name = self._waiting.pop(0)
        self._runner: Runner | None = None
        self._made_here, self._times = 0, []

    @property
    def runner(self) -> Runner:
        """The present candidate's."""
        self._runner = self._runner or self._makers[self.name]()
        return self._runner

    @property
    def body(self) -> Body:
        """The candidate's."""
        return self.runner.body

    def form(self, batch: Any) -> str:
        """The candidate's."""
        return self.runner.form(batch)

    def forget(self) -> None:
        """Begin anew with the present candidate, or with what is chosen."""
        self.runner.forget()
        self._made_here, self._times = 0, []

    def end(self) -> None:
        """Let go of what the present candidate has recorded."""
        if self._runner is not None:
            self._runner.end()

    def __call__(self, batch: Any, made: int, look: Look | None = None) -> Metrics:
        """One step, timed if that is still to be done."""
        if self.chosen or not self._usual.fits(batch):
            return self.runner(batch, made, look)
        start = self._now()
        metrics = self.runner(batch, made, look)
        self._count(self._now() - start)
        return metrics

    def refuse(self, reason: str) -> None:
        """Go on without the present candidate.

        Raises:
            RuntimeError: if no other is left.

        """
        self.refused[self.name] = " ".join(reason.split())[:200]
        self._end()

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def _count(self, seconds: float) -> None:
        self._made_here += 1
        if self._made_here > UNCOUNTED:
            self._times.append(seconds)
        if len(self._times) == COUNTED:
            self.milliseconds[self.name] = self._agree(1e3 * statistics.median(self._times))
            self._end()

    def _end(self) -> None:
        if self._waiting:
            self._next()
            return
        if not self.milliseconds:
            raise RuntimeError(f"no backend can make this step: {self.refused}")
        best = min(self.milliseconds, key=lambda name: self.milliseconds[name])
        if best != self.name:
            self.name, self._runner = best, None
        self._chosen = True
