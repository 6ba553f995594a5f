"""Which batches a step is compiled, recorded and measured for: those of the shapes that come again and again."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from fullstride.device.tensor_trees import flattened
from fullstride.step.torch.runners.python_numbers import Constants

# So many batches are usual: an epoch's smaller last one, with which a run may go on, comes once.
AGAIN = 4
# Batches in a row, before any are usual, that neither are the first kind nor alike, after which that is told.
NEVER = 32


def shapes(batch: Any) -> list[Any]:
    """What a compiled or captured step is made for: names in their order, shapes, dtypes, and whatever is no tensor."""
    leaves, structure = flattened(batch)
    return [structure, *map(_kind, leaves)]


def _kind(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype
    if isinstance(leaf, np.ndarray):
        return leaf.shape, leaf.dtype, leaf.tobytes()
    return leaf if isinstance(leaf, (str, bytes, int, float, type(None))) else _Value(leaf)


class _Value:
    """Some object, equal to itself and to what it says that it equals."""

    def __init__(self, value: Any):
        self._value = value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Value):
            return False
        try:
            return self._value is other._value or bool(self._value == other._value)
        except Exception:  # of an object that has no truth value, such as one that holds arrays
            return False

    __hash__ = None  # pyright: ignore[reportAssignmentType]


class Observation(Enum):
    """Kinds of a batch beside those before it."""

    FIRST = "the first one, whose shapes are the expected ones"
    EXPECTED = "of the expected shapes, where the loss reads the expected numbers"
    OTHER = "of others, which runs as it is"
    SWITCHED = "of others that have come again and again, and are the expected ones from here on"
    LOST = "one of so many in a row of others that nothing can be expected"


class Seen(NamedTuple):
    """Tracker of what a step is made for: the shapes of a batch, and the Python numbers that its loss reads."""

    shapes: list[Any]
    numbers: list[Any]


@dataclass(frozen=True)
class Streak:
    """Batches in a row that were not as expected: the last one, how many like it came last, and how many in all."""

    last: Seen | None = None
    alike: int = 0
    others: int = 0

    def with_another(self, seen: Seen) -> "Streak":
        """The streak, one longer."""
        return Streak(seen, self.alike + 1 if seen == self.last else 1, self.others + 1)


class ShapeTracker:
    """Looks at the batches of a training: the first one's shapes are expected, until others prove to be usual.

    Sizes that take turns, as of buckets, change nothing once the first has come `AGAIN` times. Python numbers that the
    loss reads belong to what a step is made for, too; if they change, that counts whenever it is.

    Attributes:
        shapes: of the batch that was observed last.
        differing: the numbers that were other than expected when it `SWITCHED` or was `LOST`, "" if there were none.

    """

    def __init__(self, constants: Callable[[], Constants] | None = None) -> None:
        """No batch has come yet; `constants` looks for numbers that the loss reads."""
        self._look = constants
        self.forget()

    def forget(self) -> None:
        """Begin anew with the next batch, as after a checkpoint was loaded."""
        self._constants: Constants | None = None
        self._expected: Seen | None = None
        self._came = 0
        self._streak = Streak()
        self.shapes: list[Any] = []
        self.differing = ""

    def observe(self, batch: Any) -> Observation:
        """Observe the next batch of the training."""
        if self._constants is None and self._look is not None:
            self._constants = self._look()
        self.shapes = shapes(batch)
        seen = Seen(self.shapes, [] if self._constants is None else self._constants.now())
        if self._expected is None:
            self._expected, self._came = seen, 1
            return Observation.FIRST
        if seen == self._expected:
            self._came += 1
            if self._streak.others:
                self._streak = Streak()
            return Observation.EXPECTED
        if self._came >= AGAIN and seen.shapes != self._expected.shapes:
            return Observation.OTHER
        self._streak = self._streak.with_another(seen)
        if self._streak.alike < AGAIN and self._streak.others != NEVER:
            return Observation.OTHER
        self.differing = self._difference(self._expected, seen)
        if self._streak.alike < AGAIN:
            return Observation.LOST
        self._expected = seen
        self._came = AGAIN
        self._streak = Streak()
        return Observation.SWITCHED

    def _difference(self, before: Seen, now: Seen) -> str:
        if self._constants is None:
            return ""
        named = zip(self._constants.names, before.numbers, now.numbers, strict=True)
        return ", ".join(f"{name} (was {old}, is {new})" for name, old, new in named if old != new)
