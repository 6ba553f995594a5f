"""Streaming parsers of an answer: plain text, and text that is a call because the request forces one."""

import json
from collections.abc import Collection
from typing import Any
from uuid import uuid4

from fullstride.llm.text.utf8_stream import whole_characters

Pieces = list[dict[str, Any]]


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
        return [(call["name"], arguments_of(call.get("arguments", call.get("parameters")))) for call in found] or None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def arguments_of(given: Any) -> str:
    """Return arguments as the text of a JSON object, which clients read and send back; nothing is an empty one.

    Args:
        given: a value, or its JSON.

    Raises:
        TypeError, ValueError: for what is no object, or no JSON.

    """
    value = json.loads(given, strict=False) if given and isinstance(given, str) else given
    if value not in (None, "") and not isinstance(value, dict):
        raise TypeError(f"arguments are {type(value).__name__}")
    return whole_characters(json.dumps(value or {}, ensure_ascii=False, allow_nan=False))


def begun(text: str, tag: str) -> int:
    """Return how many of a text's last characters may be the beginning of a tag."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)
