"""Streaming parser of content and calls in an answer, whichever format its model writes calls in."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from fullstride.llm.server.tools.cursor import Calls, Cursor, NoCallError, Reading
from fullstride.llm.server.tools.formats.base import CallFormat
from fullstride.llm.server.tools.parsers import Pieces, ToolParser, begun, call_piece
from fullstride.llm.server.tools.reasoning import THINK, ThinkTags


class CallParser(ToolParser):
    """Parser of content and calls in one answer.

    Calls are read outside of reasoning alone, which is what an answer begins with between its tags. A tag that no call
    of a known function follows is content, as the model wrote it. What is held back is what may be the beginning of a
    tag, and a tag with what may be the beginning of a call.
    """

    def __init__(
        self,
        form: CallFormat,
        schemas: Mapping[str, Any],
        most: int | None = None,
        thinking: bool | None = False,
        tags: ThinkTags = THINK,
    ):
        """Read calls of these functions, at most so many.

        Args:
            form: how the model writes calls.
            schemas: of the functions' arguments, by their names.
            most: calls.
            thinking: whether the prompt ends within reasoning; None if the text has none.
            tags: around reasoning.

        """
        self._form = form
        self._schemas = schemas
        self._most = most
        self._tags = tags
        self._made = 0
        self._held = ""
        self._state: Callable[[bool], Pieces | None] = self._thinking if thinking else self._beginning
        if thinking is None:
            self._state = self._start
        self._tag = ""
        self._opening = re.compile("|".join(map(re.escape, form.opens)))
        self._cursor = Cursor()
        self._reading: Reading[Calls] | None = None
        # Of the text after the latest call, as long as it is but spaces.
        self._spaces: str | None = None

    def read(self, text: str, last: bool) -> Pieces:
        """Return the text and calls that are certain now."""
        self._held += text
        pieces: Pieces = []
        while (found := self._state(last)) is not None:
            for piece in found:
                if pieces and "content" in pieces[-1] and "content" in piece:
                    piece = {"content": pieces.pop()["content"] + piece["content"]}
                pieces.append(piece)
        return pieces

    def finish_reason(self, reason: str) -> str:
        """Return `tool_calls` as the reason after calls."""
        return "tool_calls" if self._made and reason == "stop" else reason

    # States: each returns pieces and is followed by the next one, or None where more text is needed.

    def _beginning(self, last: bool) -> Pieces | None:
        text, tag = self._held.lstrip(), self._tags.open
        if not last and tag.startswith(text):
            return None
        self._state = self._thinking if text.startswith(tag) else self._start
        return []

    def _thinking(self, last: bool) -> Pieces | None:
        thought, tag, rest = self._held.partition(self._tags.close)
        if not tag:
            return self._certain(0 if last else begun(thought, self._tags.close))
        self._held, self._state = rest, self._start
        return self._content(thought + tag)

    def _start(self, last: bool) -> Pieces | None:
        """Read the first character of an answer, which may be that of a call."""
        text = self._held.lstrip()
        if self._form.bare and not text and not last:
            return None
        self._state = self._prose
        if text and text[0] in self._form.bare:
            self._open(self._held[: -len(text)], "", text)
        return []

    def _prose(self, last: bool) -> Pieces | None:
        if found := self._opening.search(self._held):
            before = self._held[: found.start()]
            self._open(found[0], found[0], self._held[found.end() :])
            return self._content(before)
        return self._certain(0 if last else max(begun(self._held, tag) for tag in self._form.opens))

    def _open(self, written: str, tag: str, rest: str) -> None:
        """Read a call; if there is none, what was written before it is content."""
        self._tag = written
        self._held = rest
        self._state = self._call
        self._cursor = Cursor()
        self._reading = self._form.read(self._cursor, tag, self._schemas)

    def _certain(self, held: int) -> Pieces | None:
        """Return all content but so many characters at its end."""
        certain = len(self._held) - held
        text, self._held = self._held[:certain], self._held[certain:]
        return self._content(text) or None

    def _call(self, last: bool) -> Pieces | None:
        self._cursor.text, self._cursor.last = self._held, last
        try:
            next(self._reading or iter(()))
        except StopIteration as done:
            return self._called(done.value)
        except NoCallError:
            self._state = self._prose
            return self._content(self._tag)
        return None

    def _called(self, calls: Calls) -> Pieces:
        self._held = self._cursor.rest
        self._state, self._spaces = self._prose, ""
        wanted = calls if self._most is None else calls[: self._most - self._made]
        first, self._made = self._made, self._made + len(wanted)
        return [call_piece(first + i, *call) for i, call in enumerate(wanted)]

    def _content(self, text: str) -> Pieces:
        # Line breaks between calls, and after the last one, are no content; before content they are a part of it.
        if self._spaces is not None:
            text, self._spaces = self._spaces + text, None
            if not text or text.isspace():
                self._spaces = text
                return []
        return [{"content": text}] if text else []


class CallsOrContent(CallParser):
    """Parser of a text that is calls if it begins with one, and else content, whatever tags it has."""

    def _beginning(self, last: bool) -> Pieces | None:
        text, opens = self._held.lstrip(), self._form.opens
        if not last and any(tag.startswith(text) and tag != text for tag in opens):
            return None
        self._state = self._prose if text.startswith(opens) else self._rest
        return []

    def _rest(self, last: bool) -> Pieces | None:
        text, self._held = self._held, ""
        return self._content(text) or None
