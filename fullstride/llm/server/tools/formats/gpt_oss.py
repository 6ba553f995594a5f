"""Answers of GPT-OSS: messages in channels, of which a function is called by one that is addressed to it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fullstride.llm.server.tools.cursor import Calls, Cursor, NoCallError, Reading
from fullstride.llm.server.tools.formats.base import CallFormat
from fullstride.llm.server.tools.parsers import Pieces, ToolParser, arguments_of, begun, call_piece

START, END, MESSAGE, CHANNEL, CONSTRAIN = "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>"
# Of these the first closes a message, and the others open the next one.
BEHIND = re.compile("|".join(map(re.escape, (END, START, CHANNEL))))
HEADER = re.compile(rf"({re.escape(START)}|{re.escape(CHANNEL)}|to=)")
RECIPIENT, NAME = re.compile(r"to=functions\.([^\s<]+)"), re.compile(rf"{re.escape(CHANNEL)}\s*(\w+)")
MOST_OF_A_HEADER = 512


@dataclass
class _Message:
    """A message that is being read.

    Attributes:
        header: as it was written.
        function: that it calls.
        key: of the delta that has its text.
        text: so far, of a call.

    """

    header: str = ""
    function: str = ""
    key: str = "content"
    text: str = ""

    @classmethod
    def of(cls, header: str) -> "_Message":
        found, channel = RECIPIENT.search(header), NAME.search(header)
        thinks = channel is not None and channel[1] == "analysis"
        return cls(header, found[1] if found else "", "reasoning_content" if thinks else "content")


class ChannelParser(ToolParser):
    """Parser of channels: `analysis` is reasoning, a message to a function is a call, all others are content."""

    def __init__(self, schemas: Mapping[str, Any], most: int | None, separates: bool):
        """Read calls of these functions, at most so many; without `separates` reasoning is content, with its marks."""
        self._schemas = schemas
        self._most = most
        self._separates = separates
        self._held, self._made = "", 0
        self._message: _Message | None = None

    def read(self, text: str, last: bool) -> Pieces:
        """Return the reasoning, content and calls that are certain now."""
        self._held += text
        pieces: Pieces = []
        while self._held:
            found = self._open(last) if self._message is None else self._body(self._message, last)
            if found is None:
                break
            pieces += found
        return pieces + (self._close(self._message, "") if last and self._message else [])

    def finish_reason(self, reason: str) -> str:
        """Return `tool_calls` as the reason after calls."""
        return "tool_calls" if self._made and reason == "stop" else reason

    def _open(self, last: bool) -> Pieces | None:
        """Read the header of a message; a text without one is content, and so is a mark that opens none."""
        header, mark, rest = self._held.partition(MESSAGE)
        start = self._held.lstrip()
        opened = HEADER.match(start)
        if opened and mark and len(header) <= MOST_OF_A_HEADER:
            self._message, self._held = _Message.of(header + mark), rest
            return self._raw(self._message, header + mark)
        begins = opened or any(tag.startswith(start) for tag in (START, CHANNEL, "to="))
        if begins and not last and len(self._held) <= MOST_OF_A_HEADER + len(MESSAGE):
            return None
        if opened and last and not mark:
            self._held = ""  # cut off before there was a text
            return []
        self._message = _Message()
        size = len(self._held) - len(start) + opened.end() if opened else 0
        text, self._held = self._held[:size], self._held[size:]
        return [{"content": text}] if text else []

    def _body(self, message: _Message, last: bool) -> Pieces | None:
        found = BEHIND.search(self._held)
        certain = found.start() if found else len(self._held)
        if not found and not last:
            certain -= max(begun(self._held, tag) for tag in (END, START, CHANNEL))
        text, self._held = self._held[:certain], self._held[certain:]
        pieces: Pieces = []
        if message.function:
            message.text += text
        elif text:
            pieces = self._raw(message, text) or [{message.key: text}]
        if not found:
            return pieces or None
        mark = END if found[0] == END else ""
        self._held = self._held[len(mark) :]
        return pieces + self._close(message, mark)

    def _raw(self, message: _Message, text: str) -> Pieces:
        """Return a part of reasoning that is not separated, as it was written."""
        thinks = message.key != "content" and not message.function
        return [{"content": text}] if text and thinks and not self._separates else []

    def _close(self, message: _Message, mark: str) -> Pieces:
        """End a message: a call, if it is one of a known function; else it is content as it was written."""
        self._message = None
        if not message.function:
            return self._raw(message, mark)
        try:
            if message.function not in self._schemas:
                raise ValueError(message.function)
            arguments = arguments_of(message.text)
        except (ValueError, TypeError, RecursionError):
            return [{"content": message.header + message.text + mark}]
        if self._most is not None and self._made >= self._most:
            return []
        self._made += 1
        return [call_piece(self._made - 1, message.function, arguments)]


def read(cursor: Cursor, tag: str, schemas: Mapping[str, Any]) -> Reading[Calls]:
    """Read nothing: `ChannelParser` reads whole answers."""
    raise NoCallError
    yield


FORMAT = CallFormat(
    name="gpt_oss",
    signs=(CHANNEL,),
    opens=(CHANNEL,),
    read=read,
    marks=(START, END, MESSAGE, CHANNEL, CONSTRAIN),
    parser=ChannelParser,
)
