"""Tool calls and content, read out of a model's text as it comes."""

import json
from collections.abc import Collection
from typing import Any
from uuid import uuid4

from fullstride.llm.text.utf8_stream import whole_characters

Pieces = list[dict[str, Any]]


class Reader:
    """Turns one answer's text into content and calls; here all text is content."""

    def read(self, text: str, last: bool) -> Pieces:
        """Deltas of a message."""
        return [{"content": text}] if text else []

    def finish_reason(self, reason: str) -> str:
        """OpenAI's word for why the answer ended: the engine's own, also where the caller had named the tool."""
        return reason


class Named(Reader):
    """All text is the arguments of one function."""

    def __init__(self, name: str):
        """Of this one."""
        self._name, self._begun = name, False

    def read(self, text: str, last: bool) -> Pieces:
        """The next part of the arguments."""
        if not self._begun:
            self._begun = True
            return [call_piece(0, self._name, text)]
        return [{"tool_calls": [{"index": 0, "function": {"arguments": text}}]}] if text else []


class Required(Reader):
    """All text is one call; if it was cut off, it is content."""

    def __init__(self, names: Collection[str]):
        """Of one of these functions."""
        self._names, self._text, self._called = names, "", False

    def read(self, text: str, last: bool) -> Pieces:
        """Everything at the end."""
        self._text += text
        if not last:
            return []
        calls = calls_of(self._text, self._names)
        self._called = bool(calls)
        return [call_piece(0, *calls[0])] if calls else [{"content": self._text}]

    def finish_reason(self, reason: str) -> str:
        """An end after a call is its."""
        return "tool_calls" if self._called else reason


def call_piece(index: int, name: str, arguments: str) -> dict[str, Any]:
    """A whole call, or the beginning of one."""
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
