"""`auto`: the backends are measured by the first steps of the training itself, and the fastest one goes on."""

import statistics
import time
from collections.abc import Callable

import torch

from fullstride.step.torch.body import Metrics, Runner
from fullstride.step.torch.runners.graph import WARM

# Steps of a candidate before those that count: those before a record, the record itself, its first replays.
UNCOUNTED, COUNTED = WARM + 3, 8


class Auto:
    """Gives each candidate some steps and chooses the fastest. Each is a whole step of the training: none is lost.

    Attributes:
        runner: that of the candidate whose turn it is, made anew at each turn, and at last the chosen one's.
        chosen: whether all were measured.
        milliseconds: medians of those measured.
        refused: why others were not.

    """

    def __init__(
        self, candidates: dict[str, Callable[[], Runner]], device: torch.device, agree: Callable[[float], float]
    ):
        """Take what makes each candidate's runner, and what makes of a time that of all processes."""
        self._candidates = candidates
        self._device = device
        self._agree = agree
        self._waiting = list(candidates)
        self.milliseconds: dict[str, float] = {}
        self.refused: dict[str, str] = {}
        self.chosen = False
        self._begin(self._waiting.pop(0))

    def __str__(self) -> str:
        """What was chosen, and why."""
        times = ", ".join(f"{name} {ms:.2f} ms" for name, ms in sorted(self.milliseconds.items(), key=lambda x: x[1]))
        told = "; ".join([times, *(f"{name}: {why}" for name, why in self.refused.items())])
        return f"backend=auto: {self.runner.backend} ({told})"

    def _begin(self, name: str) -> None:
        self.runner = self._candidates[name]()
        self.forget()

    def forget(self) -> None:
        """Count the present candidate's steps from the beginning."""
        self._made, self._times = 0, list[float]()

    def timed(self, step: Callable[[], Metrics]) -> Metrics:
        """A step of the present candidate, which may be its last."""
        start = self._now()
        metrics = step()
        self._made += 1
        if self._made > UNCOUNTED:
            self._times.append(self._now() - start)
        if len(self._times) == COUNTED:
            self.milliseconds[self.runner.backend] = self._agree(1e3 * statistics.median(self._times))
            self._end_turn()
        return metrics

    def refuse(self, reason: str) -> None:
        """Go on without the present candidate.

        Raises:
            RuntimeError: if no other is left.

        """
        self.refused[self.runner.backend] = " ".join(reason.split())[:200]
        self._end_turn()

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def _end_turn(self) -> None:
        if self._waiting:
            self._begin(self._waiting.pop(0))
            return
        if not self.milliseconds:
            raise RuntimeError(f"no backend can make this step: {self.refused}")
        best = min(self.milliseconds, key=lambda name: self.milliseconds[name])
        if best != self.runner.backend:
            self._begin(best)
        self.chosen = True
