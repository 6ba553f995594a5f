"""Runner of steps by an eager body, or by one compiled for the expected shapes."""

from dataclasses import dataclass
from typing import Any

import torch

from fullstride.step.torch.body import Body, Look
from fullstride.step.torch.metrics import Metrics


@dataclass(eq=False)
class Runner:
    """Runner of steps by an eager body; one compiled for the expected shapes leaves other batches to the eager one.

    Attributes:
        backend: its name.
        body: by which it makes them, compiled if it compiles.
        eager: by which it makes those of other batches.

    """

    backend: str
    body: Body
    eager: Body

    @property
    def compiles(self) -> bool:
        """Return whether steps of the expected shapes are compiled."""
        return self.body is not self.eager

    def form(self, expected: bool) -> str:
        """Name of the form in which the next step runs; each form is checked separately."""
        return f"backend={self.backend}, {'usual' if expected else 'other'} shapes"

    def __call__(self, batch: Any, made: int, *, expected: bool, look: Look | None = None) -> Metrics:
        """Make one step after `made` others, and update the averages; `look` is given loss and gradients first."""
        body = self.body if expected else self.eager
        metrics = body(batch, torch.tensor(made), look)
        if body.ema.due(made + 1):
            body.ema.follow(torch.tensor(made + 1))
        return metrics

    def forget(self) -> None:
        """Start over, as after a checkpoint was loaded."""

    def end(self) -> None:
        """Release captured graphs."""
