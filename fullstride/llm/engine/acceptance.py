"""Measurements that decide whether drafts are verified: what they bring, and what a step costs."""

from collections import deque
from dataclasses import dataclass

# What is assumed before any draft: the share of places that have one, and of its tokens that are chosen.
FIRST = 0.5
# Latest times of a program, of which the shortest counts: others waited for what else the machine does.
TIMES = 4
# Decode steps in which half of what is known of the cost of verifying is forgotten, so that it is measured again.
HALF_LIFE = 512


@dataclass
class Acceptance:
    """Running means of what drafts bring.

    Attributes:
        found: share of the places that have a draft.
        accepted: share of a draft's tokens that are chosen, of those that follow chosen ones.

    """

    found: float = FIRST
    accepted: float = FIRST

    def observe(self, drafted: int, matched: int, known: int, weight: float) -> None:
        """Count a place.

        Args:
            drafted: tokens of its draft, 0 for none.
            matched: tokens of the draft, from its first on, that were chosen.
            known: tokens that were chosen.
            weight: share of each observation in the means.

        """
        self.found += weight * ((drafted > 0) - self.found)
        for i in range(min(matched + 1, drafted, known)):
            self.accepted += weight * ((i < matched) - self.accepted)

    def tokens(self, drafted: int) -> float:
        """Return the tokens to expect of a step that verifies so many drafted ones: they, and one behind them."""
        return 1.0 + sum(self.accepted**i for i in range(1, drafted + 1))


class StepTimes:
    """Seconds of decode steps, and of steps that verify drafts, for each number of rows."""

    def __init__(self):
        """Nothing is known yet."""
        self._decode: dict[int, deque[float]] = {}
        self._verify: dict[int, deque[float]] = {}
        self._age: dict[int, int] = {}

    def decoded(self, rows: int, seconds: float, steps: int) -> None:
        """Record a burst of decode steps."""
        _record(self._decode, rows, seconds / steps)
        self._age[rows] = self._age.get(rows, 0) + steps

    def verified(self, rows: int, seconds: float) -> None:
        """Record a step that verifies drafts."""
        _record(self._verify, rows, seconds)
        self._age[rows] = 0

    def ratio(self, rows: int) -> float:
        """Return the cost of a step that verifies drafts, in decode steps; 1 while either is unknown."""
        verify, decode = self._verify.get(rows), self._decode.get(rows)
        if not verify or not decode:
            return 1.0
        return 1 + (min(verify) / min(decode) - 1) * 0.5 ** (self._age[rows] / HALF_LIFE)


def _record(times: dict[int, deque[float]], rows: int, seconds: float) -> None:
    """Record a time, except a program's first, which sets things up."""
    if rows in times:
        times[rows].append(seconds)
    times.setdefault(rows, deque(maxlen=TIMES))
