"""Batches that a step is compiled, captured and measured for: those of recurring shapes.

Python numbers that a loss reads are constants of a step that is compiled or captured, whoever changes them.
"""

import functools
from collections.abc import Callable, Iterable
from enum import Enum
from numbers import Number
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from fullstride.device.tensor_trees import flattened
from fullstride.step.torch.runners.reached_state import ReachableState

# Number of like batches that become the expected ones; an epoch's smaller last batch comes once.
AGAIN = 4
# Warn after this many consecutive batches that match neither the first shape nor each other.
NEVER = 32
# A longer list is data.
SHORT = 16


class PythonNumbers:
    """Numbers that a program's functions name, in closures, globals, attributes and dicts, and modules' `training`."""

    def __init__(self, roots: Iterable[Any]):
        """Look for them from these objects on; those that are made later are not seen."""
        reached = ReachableState(roots)
        found = [(v.name, v.read) for v in reached.variables if isinstance(v.value, Number)]
        for x in reached.objects.values():
            if isinstance(x, (dict, list)):
                found += _items(x, reached.names)
            elif not isinstance(x, type):
                found += _attributes(x, reached.names)
        self._read: list[Callable[[], Any]] = [read for _, read in found]
        modules = [x for x in reached.objects.values() if isinstance(x, nn.Module)]
        self._modules = [vars(module) for module in modules]
        self.names = [*(name for name, _ in found), *(f"{type(module).__name__}.training" for module in modules)]

    def now(self) -> list[Any]:
        """Return their current values."""
        return [*[read() for read in self._read], *[own["training"] for own in self._modules]]


def _attributes(x: Any, names: set[str]) -> list[tuple[str, Callable[[], Any]]]:
    own = getattr(x, "__dict__", {})
    known = sorted(name for name in names & own.keys() if isinstance(own[name], Number))
    return [(f"{type(x).__name__}.{name}", functools.partial(own.get, name)) for name in known]


def _items(x: dict[Any, Any] | list[Any], names: set[str]) -> list[tuple[str, Callable[[], Any]]]:
    if isinstance(x, dict):
        named = [key for key, value in x.items() if isinstance(value, Number) and key in names]
        return [(repr(key), functools.partial(x.get, key)) for key in named]
    given = [i for i, value in enumerate(x) if isinstance(value, Number)] if len(x) <= SHORT else []
    return [(f"item {i} of a list", lambda i=i: x[i] if i < len(x) else None) for i in given]


def shapes(batch: Any) -> list[Any]:
    """Return the key that a step is specialised to: names in order, shapes, dtypes, and values that are not tensors."""
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
    """Outcomes of comparing a batch with those before it."""

    FIRST = "the first one, whose shapes are the expected ones"
    EXPECTED = "of the expected shapes, while the loss reads the expected numbers"
    OTHER = "of others, which runs as it is"
    SWITCHED = "of others that have come again and again, and are the expected ones from here on"
    LOST = "one of so many in a row of others that nothing can be expected"


class SpecialisedTo(NamedTuple):
    """Tracker of what a step is made for: the shapes of a batch, and the Python numbers that its loss reads."""

    shapes: list[Any]
    numbers: list[Any]


class Streak(NamedTuple):
    """Consecutive unexpected batches: the last one, how many like it came last, and how many in all."""

    last: SpecialisedTo | None = None
    alike: int = 0
    others: int = 0


class ShapeTracker:
    """Tracker of the expected shapes: the first batch's, until others come consistently.

    Sizes that take turns, as of buckets, change nothing once the first has come `AGAIN` times. Python numbers that the
    loss reads belong to what a step is made for, too; if they change, that counts whenever it is.

    Attributes:
        shapes: of the batch that was observed last.
        differing: the numbers that were other than expected when it `SWITCHED` or was `LOST`, "" if there were none.

    """

    def __init__(self, constants: Callable[[], PythonNumbers] | None = None) -> None:
        """No batch has come yet; `constants` looks for numbers that the loss reads."""
        self._look = constants
        self.forget()

    def forget(self) -> None:
        """Start over with the next batch, as after a checkpoint was loaded."""
        self._constants: PythonNumbers | None = None
        self._expected: SpecialisedTo | None = None
        self._came = 0
        self._streak = Streak()
        self.shapes: list[Any] = []
        self.differing = ""

    def observe(self, batch: Any) -> Observation:
        """Observe the next batch of the training."""
        if self._constants is None and self._look is not None:
            self._constants = self._look()
        self.shapes = shapes(batch)
        seen = SpecialisedTo(self.shapes, [] if self._constants is None else self._constants.now())
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
        last, alike, others = self._streak
        self._streak = Streak(seen, alike + 1 if seen == last else 1, others + 1)
        if self._streak.alike < AGAIN and self._streak.others != NEVER:
            return Observation.OTHER
        names = [] if self._constants is None else self._constants.names
        named = zip(names, self._expected.numbers, seen.numbers, strict=True)
        self.differing = ", ".join(f"{name} (was {old}, is {new})" for name, old, new in named if old != new)
        if self._streak.alike < AGAIN:
            return Observation.LOST
        self._expected = seen
        self._came = AGAIN
        self._streak = Streak()
        return Observation.SWITCHED
