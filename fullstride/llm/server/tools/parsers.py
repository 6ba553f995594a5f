"""Streaming parsers of tool calls and content in a model's text."""

import json
import re
from collections.abc import Callable, Collection
from typing import Any
from uuid import uuid4

from fullstride.llm.text.utf8_stream import whole_characters

Pieces = list[dict[str, Any]]
# As Hermes and Qwen models write calls.
OPEN, CLOSE = "<tool_call>", "</tool_call>"
THINK, THOUGHT = "<think>", "</think>"
# How an object that has keys begins, or a list of such.
BEGINNING = re.compile(r'\s*(\[\s*)?(\{\s*("|$)|$)')
# What JSON has outside its texts.
OUTSIDE = frozenset(' \t\r\n{}[],:"+-.0123456789eEtrufalsn')


class ToolParser:
    """Parser of one answer's text into content and calls; in this class all text is content."""

    def read(self, text: str, last: bool) -> Pieces:
        """Return the message deltas of a part of the text."""
        return [{"content": text}] if text else []

    def finish_reason(self, reason: str) -> str:
        """Return OpenAI's finish reason: the engine's own, even if the request named the tool."""
        return reason


class ForcedTool(ToolParser):
    """Parser of a text that is the arguments of one function."""

    def __init__(self, name: str):
        """Read the arguments of the function `name`."""
        self._name, self._begun = name, False

    def read(self, text: str, last: bool) -> Pieces:
        """Return the next part of the arguments."""
        if not self._begun:
            self._begun = True
            return [call_piece(0, self._name, text)]
        return [{"tool_calls": [{"index": 0, "function": {"arguments": text}}]}] if text else []


class RequiredTool(ToolParser):
    """Parser of a text that is one call; if it was cut off, it is content."""

    def __init__(self, names: Collection[str]):
        """Read a call of one of the functions `names`."""
        self._names, self._text, self._called = names, "", False

    def read(self, text: str, last: bool) -> Pieces:
        """Return everything at the end of the text."""
        self._text += text
        if not last:
            return []
        calls = calls_of(self._text, self._names)
        self._called = bool(calls)
        return [call_piece(0, *calls[0])] if calls else [{"content": self._text}]

    def finish_reason(self, reason: str) -> str:
        """Return `tool_calls` as the reason after a call."""
        return "tool_calls" if self._called else reason


def call_piece(index: int, name: str, arguments: str) -> dict[str, Any]:
    """Return a whole call, or the beginning of one."""
    function = {"name": name, "arguments": arguments}
    return {"tool_calls": [{"index": index, "id": f"call_{uuid4().hex}", "type": "function", "function": function}]}


def calls_of(text: str, names: Collection[str]) -> list[tuple[str, str]] | None:
    """Names and arguments of the call or the list of calls that a text is; None if it is neither, or empty."""
    try:
        # Models put line breaks into texts as they are, where JSON has them escaped.
        found = json.loads(text, strict=False)
        found = found if isinstance(found, list) else [found]
        if any(call["name"] not in names for call in found):
            return None
        return [(call["name"], _arguments(call.get("arguments", call.get("parameters")))) for call in found] or None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def _arguments(given: Any) -> str:
    """A JSON object as text, which clients read as that and send back as that; nothing is an empty one."""
    value = json.loads(given) if given and isinstance(given, str) else given
    if value not in (None, "") and not isinstance(value, dict):
        raise TypeError(f"arguments are {type(value).__name__}")
    return whole_characters(json.dumps(value or {}, ensure_ascii=False, allow_nan=False))


def thinks(prompt: str) -> bool:
    """Return whether a prompt ends within reasoning, as DeepSeek-R1's does, so that the answer continues it."""
    return prompt.rstrip().endswith(THINK)


def thinks_on(answer: str) -> bool:
    """Return whether an answer that is to be continued stops within reasoning."""
    return answer.rfind(THINK) > answer.rfind(THOUGHT)


def begun(text: str, tag: str) -> int:
    """Return how many of a text's last characters may be the beginning of a tag."""
    return next((n for n in range(len(tag) - 1, 0, -1) if text.endswith(tag[:n])), 0)


class NoJsonError(ValueError):
    """Error of a text that does not begin with a JSON object or list of objects."""


class JsonScanner:
    """Scanner for the end of the JSON at the beginning of a text; it reads each character once."""

    def __init__(self):
        """Start without text."""
        self._at = self._depth = 0
        self._quoted = self._escaped = False
        self._end: int | None = None

    def end(self, text: str) -> int | None:
        """Index behind the JSON, or None if it goes on.

        Args:
            text: what was given before, and more.

        Raises:
            NoJsonError: if there can be none.

        """
        if not BEGINNING.match(text):
            raise NoJsonError
        while self._at < len(text) and self._end is None:
            char, self._at = text[self._at], self._at + 1
            if self._quoted:
                self._quoted = self._escaped or char != '"'
                self._escaped = char == "\\" and not self._escaped
            elif char not in OUTSIDE:
                raise NoJsonError
            else:
                self._quoted = char == '"'
                self._depth += (char in "{[") - (char in "}]")
                if self._depth == 0 and char in "}]":
                    self._end = self._at
        return self._end


class HermesTools(ToolParser):
    """Parser of Hermes-style content and calls in one answer.

    Calls are read outside of reasoning alone, which is what an answer begins with between `<think>` tags. A tag that no
    call of a known function follows is content, as the model wrote it. What is held back is what may be the beginning
    of a tag, and a tag with what may be the beginning of a call.
    """

    def __init__(self, names: Collection[str], most: int | None, thinking: bool | None = False):
        """Read calls of these functions, at most so many.

        Args:
            names: of the functions.
            most: calls.
            thinking: whether the prompt ends within reasoning; None if the text has none.

        """
        self._names = names
        self._most = most
        self._made = 0
        self._held = ""
        self._state: Callable[[bool], Pieces | None] = self._thinking if thinking else self._beginning
        if thinking is None:
            self._state = self._prose
        self._scanner = JsonScanner()
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
        text = self._held.lstrip()
        if not last and THINK.startswith(text):
            return None
        self._state = self._thinking if text.startswith(THINK) else self._prose
        return []

    def _thinking(self, last: bool) -> Pieces | None:
        return self._until(THOUGHT, last, self._prose, kept=THOUGHT)

    def _prose(self, last: bool) -> Pieces | None:
        return self._until(OPEN, last, self._call)

    def _until(self, tag: str, last: bool, then: Callable[[bool], Pieces | None], kept: str = "") -> Pieces | None:
        """Return content up to a tag, or the part that cannot be the beginning of the tag."""
        if tag in self._held:
            before, _, self._held = self._held.partition(tag)
            self._state, self._scanner = then, JsonScanner()
            return self._content(before + kept)
        certain = len(self._held) - (0 if last else begun(self._held, tag))
        text, self._held = self._held[:certain], self._held[certain:]
        return self._content(text) or None

    def _call(self, last: bool) -> Pieces | None:
        try:
            end = self._scanner.end(self._held)
        except NoJsonError:
            return self._no_call()
        if end is None:
            return self._no_call() if last else None
        after = self._held[end:].lstrip()
        if not last and any(tag.startswith(after) and tag != after for tag in (CLOSE, OPEN)):
            return None
        # Models that end with a call, or go on with another one, may leave its tag open.
        closed = after.startswith((CLOSE, OPEN)) or CLOSE.startswith(after)
        calls = calls_of(self._held[:end], self._names) if closed else None
        if calls is None:
            return self._no_call()
        self._held = after if after.startswith(OPEN) else after[len(CLOSE) :]
        self._state, self._spaces = self._prose, ""
        wanted = calls if self._most is None else calls[: self._most - self._made]
        first, self._made = self._made, self._made + len(wanted)
        return [call_piece(first + i, *call) for i, call in enumerate(wanted)]

    def _no_call(self) -> Pieces:
        self._state = self._prose
        return self._content(OPEN)

    def _content(self, text: str) -> Pieces:
        # Line breaks between calls, and after the last one, are no content; before content they are a part of it.
        if self._spaces is not None:
            text, self._spaces = self._spaces + text, None
            if not text or text.isspace():
                self._spaces = text
                return []
        return [{"content": text}] if text else []


class CallsOrContent(HermesTools):
    """Parser of a text that is calls if it begins with one, and else content, whatever tags it has."""

    def _beginning(self, last: bool) -> Pieces | None:
        text = self._held.lstrip()
        if not last and OPEN.startswith(text) and text != OPEN:
            return None
        self._state = self._prose if text.startswith(OPEN) else self._rest
        return []

    def _rest(self, last: bool) -> Pieces | None:
        text, self._held = self._held, ""
        return self._content(text) or None
