"""From tokens to text that is certain, with stop texts cut off."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable


@runtime_checkable
class Detokenizes(Protocol):
    """A detokenizer, such as `fullstride.llm.text.tokenizer.Detokenizer`."""

    def push(self, ids: Sequence[int]) -> str: ...

    def flush(self) -> str: ...


class Text:
    """Text of one completion; what a stop text may begin with is held back until it is certain."""

    def __init__(self, detokenizer: Detokenizes | None, stops: Sequence[str] = (), include: bool = False):
        """Nothing yet; without a detokenizer there is never any text."""
        self._detokenizer, self._stops, self._include = detokenizer, tuple(stops), include
        self._held = ""

    def push(self, token: int, watch: bool) -> tuple[str, str | None]:
        """Take a token.

        Args:
            token: of the output.
            watch: whether a stop text ends it by now; one that ends before is passed over.

        Returns:
            Text that is certain, and the stop text that was found, if one was.

        """
        if self._detokenizer is None:
            return "", None
        return self._add(self._detokenizer.push([token]), watch)

    def flush(self, watch: bool) -> tuple[str, str | None]:
        """What is left at the end: half characters and what no stop text came of."""
        if self._detokenizer is None:
            return "", None
        text, found = self._add(self._detokenizer.flush(), watch)
        rest, self._held = self._held, ""
        return text + rest, found

    def _add(self, new: str, watch: bool) -> tuple[str, str | None]:
        held, text = len(self._held), self._held + new
        # A stop text may begin in what was held back, but one that ended there was passed over.
        ends = [(at, stop) for stop in self._stops if (at := text.find(stop, max(0, held - len(stop) + 1))) >= 0]
        if watch and ends:
            at, stop = min(ends, key=lambda place: (place[0], -len(place[1])))
            self._held = ""
            return text[: at + len(stop) if self._include else at], stop
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None


def _overlap(text: str, stop: str) -> int:
    """How much of the text's end the stop text begins with."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
