"""Which batches a step is compiled, recorded and measured for: those of the shapes that come again and again."""

from collections.abc import Callable
from typing import Any

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


class Usual:
    """Looks at the batches of a training: the first one's shapes are the usual ones, until others prove to be.

    One for a step and all its runners, which ask it what to run in the form that is made for the usual shapes. Python
    numbers that the loss reads belong to what a step is made for, too.
    """

    def __init__(self, constants: Callable[[], Constants] | None = None) -> None:
        """No batch has come yet; `constants` looks for numbers that the loss reads."""
        self._look = constants
        self.forget()

    def forget(self) -> None:
        """Begin anew with the next batch, as after a checkpoint was loaded."""
        self._constants: Constants | None = None
        self._numbers: list[Any] = []
        self._usual: tuple[list[Any], list[Any]] | None = None
        self._last: tuple[list[Any], list[Any]] | None = None
        self._came = self._alike = self._others = 0

    def fits(self, batch: Any) -> bool:
        """Whether a batch has the usual shapes, as any has before the first one, and the loss the usual numbers."""
        return self._usual is None or (self._numbers == self._usual[1] and shapes(batch) == self._usual[0])

    def changed(self, batch: Any) -> bool:
        """Whether what is usual is another now: so many have come like this one, and fewer of the first kind.

        Sizes that take turns, as of buckets, change nothing once the first has come as often. Numbers that changed
        do, whenever that is.
        """
        if self._constants is None and self._look is not None:
            self._constants = self._look()
        self._numbers = [] if self._constants is None else self._constants.now()
        settled = self._came >= AGAIN
        if settled and self._usual is not None and self._numbers == self._usual[1]:
            self._others = 0
            return False
        found = shapes(batch), self._numbers
        self._usual = self._usual or found
        if found == self._usual:
            self._came += 1
            self._alike = self._others = 0
            return False
        if settled and found[0] != self._usual[0]:
            return False
        self._others += 1
        self._alike = self._alike + 1 if found == self._last else 1
        self._last = found
        if self._alike < AGAIN:
            return False
        self._usual, self._came, self._alike, self._others = found, AGAIN, 0, 0
        return True

    @property
    def lost(self) -> bool:
        """Whether just now so many batches in a row were none of the usual ones."""
        return self._others == NEVER

    @property
    def differing(self) -> str:
        """The numbers that are not the usual ones now, "" if all are."""
        if self._constants is None or self._usual is None:
            return ""
        named = zip(self._constants.names, self._usual[1], self._numbers, strict=True)
        return ", ".join(f"{name} (was {old}, is {new})" for name, old, new in named if old != new)
