"""Reasoning, which models write between tags before the rest of an answer, and its streaming parser."""

from typing import NamedTuple

from fullstride.llm.server.tools.parsers import Pieces, ToolParser, begun


class ThinkTags(NamedTuple):
    """Tags around an answer's reasoning."""

    open: str
    close: str

    def begins(self, prompt: str) -> bool:
        """Return whether a prompt ends within reasoning, as DeepSeek-R1's does, so that the answer continues it."""
        return prompt.rstrip().endswith(self.open)

    def goes_on(self, answer: str) -> bool:
        """Return whether an answer that is to be continued stops within reasoning."""
        return answer.rfind(self.open) > answer.rfind(self.close)


THINK = ThinkTags("<think>", "</think>")
# Magistral's.
MISTRAL = ThinkTags("[THINK]", "[/THINK]")


class ReasoningParser(ToolParser):
    """Parser of reasoning into `reasoning_content`, as it was written between the tags; another one reads the rest."""

    def __init__(self, rest: ToolParser, thinking: bool = False, tags: ThinkTags = THINK):
        """Give the rest of the text to a parser; `thinking` if the prompt ends within reasoning."""
        self._rest = rest
        self._held = ""
        self._tags = tags
        self._opened, self._closed = thinking, False

    def read(self, text: str, last: bool) -> Pieces:
        """Return the reasoning and the pieces of the rest that are certain now."""
        self._held += text
        if not (self._opened or self._closed):
            start, tag = self._held.lstrip(), self._tags.open
            if not last and tag.startswith(start) and start != tag:
                return []
            self._opened = start.startswith(tag)
            self._closed = not self._opened
            self._held = start.removeprefix(tag) if self._opened else self._held
        pieces = [] if self._closed else self._reasoning(last)
        if self._closed:
            text, self._held = self._held, ""
            pieces += self._rest.read(text, last)
        return pieces

    def finish_reason(self, reason: str) -> str:
        """Return the reason of the rest."""
        return self._rest.finish_reason(reason)

    def _reasoning(self, last: bool) -> Pieces:
        thought, tag, self._held = self._held.partition(self._tags.close)
        self._closed = bool(tag)
        if not tag and not last and (size := begun(thought, self._tags.close)):
            thought, self._held = thought[:-size], thought[-size:]
        return [{"reasoning_content": thought}] if thought else []
