"""Streaming parser of an answer's reasoning, which models write in `<think>` tags before the rest."""

from fullstride.llm.server.tools.parsers import THINK, THOUGHT, Pieces, ToolParser, begun


class ReasoningParser(ToolParser):
    """Parser of reasoning into `reasoning_content`, as it was written between the tags; another one reads the rest."""

    def __init__(self, rest: ToolParser, thinking: bool = False):
        """Give the rest of the text to a parser; `thinking` if the prompt ends within reasoning."""
        self._rest, self._held = rest, ""
        self._opened, self._closed = thinking, False

    def read(self, text: str, last: bool) -> Pieces:
        """Return the reasoning and the pieces of the rest that are certain now."""
        self._held += text
        if not (self._opened or self._closed):
            start = self._held.lstrip()
            if not last and THINK.startswith(start) and start != THINK:
                return []
            self._opened = start.startswith(THINK)
            self._closed = not self._opened
            self._held = start.removeprefix(THINK) if self._opened else self._held
        pieces = [] if self._closed else self._reasoning(last)
        if self._closed:
            text, self._held = self._held, ""
            pieces += self._rest.read(text, last)
        return pieces

    def finish_reason(self, reason: str) -> str:
        """Return the reason of the rest."""
        return self._rest.finish_reason(reason)

    def _reasoning(self, last: bool) -> Pieces:
        thought, tag, self._held = self._held.partition(THOUGHT)
        self._closed = bool(tag)
        if not tag and not last and (size := begun(thought, THOUGHT)):
            thought, self._held = thought[:-size], thought[-size:]
        return [{"reasoning_content": thought}] if thought else []
