"""What makes steps, and what comes behind them."""

from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from fullstride.step.torch.body import Body, Look, Metrics


@runtime_checkable
class Runner(Protocol):
    """Makes steps."""

    @property
    def body(self) -> Body:
        """What it makes them by, compiled if it compiles."""
        ...

    def __call__(self, batch: Any, made: int, look: Look | None = None) -> Metrics:
        """One step after `made` others, whose loss and gradients `look` is shown before they are used, if it can be."""
        ...

    def form(self, batch: Any) -> str:
        """In which form the next step will run: what was checked in one form is not yet right in another."""
        ...

    def forget(self) -> None:
        """Begin anew, as after a checkpoint was loaded."""
        ...

    def end(self) -> None:
        """Let go of what is recorded."""
        ...


@runtime_checkable
class Follow(Protocol):
    """What comes behind the optimizer: averages."""

    def due(self, step: int) -> bool:
        """Whether there is something to do after a step, counted from 1."""
        ...

    def get_ready(self, device: torch.device) -> None:
        """Make what must not be made while `follow` is recorded."""
        ...

    def follow(self, step: Tensor) -> None:
        """Do it."""
        ...
