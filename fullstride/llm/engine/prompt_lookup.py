"""Drafts from a sequence's own tokens (prompt lookup): what followed its newest tokens when they came before."""

from collections.abc import Sequence as Several

import numpy as np
from jaxtyping import Int

from fullstride.llm.engine.sequence import Sequence


class PromptLookup:
    """Drafts from the prompt and the output of a sequence itself.

    Attributes:
        free: whether a draft costs next to nothing, so that some may be made to be compared alone.

    """

    free = True

    def __init__(self, shortest: int, longest: int):
        """Look for `longest` newest tokens at most, of which `shortest` have to be found again."""
        self._shortest, self._longest = shortest, longest

    def draft(self, sequences: Several[Sequence], counts: Several[int]) -> list[list[int]]:
        """Return a draft for each sequence: as many tokens as its count, or none."""
        return [self._own(sequence, count) for sequence, count in zip(sequences, counts, strict=True)]

    def _own(self, sequence: Sequence, count: int) -> list[int]:
        """Return what followed the newest tokens; what lies beyond the end repeats from there, as the text would."""
        known = sequence.array()
        start = repetition(known, self._shortest, self._longest) if count > 0 else None
        return [] if start is None else known[start + np.arange(count) % (len(known) - start)].tolist()


def repetition(tokens: Int[np.ndarray, " T"], shortest: int, longest: int) -> int | None:
    """Find the newest tokens among those before them.

    Args:
        tokens: of a sequence.
        shortest: newest tokens that have to be found again, at least.
        longest: newest tokens that are looked for, at most.

    Returns:
        The place after the repetition of most of them, the latest of several; None if there is none.

    """
    places, matched = np.flatnonzero(tokens[:-1] == tokens[-1]) + 1, 1
    while matched < min(longest, len(tokens)):
        longer = places[places > matched]
        longer = longer[tokens[longer - matched - 1] == tokens[-matched - 1]]
        if not len(longer):
            break
        places, matched = longer, matched + 1
    return int(places[-1]) if len(places) and matched >= shortest else None
