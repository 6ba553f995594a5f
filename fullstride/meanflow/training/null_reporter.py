"""What the processes tell that are not the first one: nothing."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fullstride.meanflow.training.guard import Judged
from fullstride.meanflow.training.state import Position


class Silent:
    """Takes reports and keeps none; see `Reporter`."""

    def __enter__(self) -> "Silent":
        """Nothing to show."""
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing to close."""

    def step(self, position: Position, metrics: dict[str, Tensor], lr: float, judge: Callable[[], Judged]) -> None:
        """The first process reports it."""

    def evaluation(self, position: Position, scores: dict[str, dict]) -> None:
        """The first process reports it."""

    def tangents(self, position: Position, report: dict[str, Any]) -> None:
        """The first process reports its own."""

    def has_evaluation(self, step: int) -> bool:
        """None is known here."""
        return False

    def restored(self, position: Position, checkpoint: str, harmful_before: int, judged: Judged) -> None:
        """The first process reports it."""
