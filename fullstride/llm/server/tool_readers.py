"""Tool calls and content, read out of a model's text as it comes."""

import json
from collections.abc import Collection
from typing import Any, Protocol, runtime_checkable
from uuid import uuid4

from fullstride.llm.characters import whole_characters

OPEN, CLOSE = "<tool_call>", "</tool_call>"
Pieces = list[dict[str, Any]]


@runtime_checkable
class Reader(Protocol):
    """Turns one answer's text into content and calls."""

    def read(self, text: str, last: bool) -> Pieces:
        """Deltas of a message."""
        ...

    def finish_reason(self, reason: str) -> str:
        """OpenAI's word for why the answer ended."""
        ...


class Plain:
    """All text is content."""

    def read(self, text: str, last: bool) -> Pieces:
        """The text, if any."""
        return [{"content": text}] if text else []

    def finish_reason(self, reason: str) -> str:
        """As the engine says."""
        return reason


class Named:
    """All text is the arguments of one function."""

    def __init__(self, name: str):
        """Of this one."""
        self._name, self._begun = name, False

    def read(self, text: str, last: bool) -> Pieces:
        """The next part of the arguments."""
        if not self._begun:
            self._begun = True
            return [_call(0, self._name, text)]
        return [{"tool_calls": [{"index": 0, "function": {"arguments": text}}]}] if text else []

    def finish_reason(self, reason: str) -> str:
        """OpenAI says stop where the caller had named the tool."""
        return reason


class Required:
    """All text is one call; if it was cut off, it is content."""

    def __init__(self, names: Collection[str]):
        """Of one of these functions."""
        self._names, self._text, self._called = names, "", False

    def read(self, text: str, last: bool) -> Pieces:
        """Everything at the end."""
        self._text += text
        if not last:
            return []
        calls = _calls(self._text, self._names)
        self._called = bool(calls)
        return [_call(0, *calls[0])] if calls else [{"content": self._text}]

    def finish_reason(self, reason: str) -> str:
        """An end after a call is its."""
        return "tool_calls" if self._called else reason


class Tagged:
    """Calls stand in tags; a tag that holds no call is content, as the model wrote it."""

    def __init__(self, names: Collection[str], most: int | None):
        """Read calls of these functions, at most so many."""
        self._names, self._most = names, most
        self._held, self._inside, self._made = "", False, 0
        # Of the text after the latest call, as long as it is but spaces.
        self._spaces: str | None = None

    def read(self, text: str, last: bool) -> Pieces:
        """What is certain now: what may be the beginning of a tag, and an open tag, are held back."""
        self._held += text
        pieces: Pieces = []
        while (tag := CLOSE if self._inside else OPEN) in self._held:
            before, _, self._held = self._held.partition(tag)
            pieces += self._called(before, OPEN + before + CLOSE) if self._inside else self._content(before)
            self._inside = not self._inside
        return pieces + self._rest(last)

    def _rest(self, last: bool) -> Pieces:
        if self._inside and not last:
            return []
        certain = len(self._held) - (0 if last else _begun(self._held, OPEN))
        text, self._held = self._held[:certain], self._held[certain:]
        # Models that end with a call may leave its tag open.
        return self._called(text, OPEN + text) if self._inside else self._content(text)

    def _content(self, text: str) -> Pieces:
        # Line breaks between calls, and after the last one, are no content; before content they are a part of it.
        if self._spaces is not None:
            text, self._spaces = self._spaces + text, None
            if not text or text.isspace():
                self._spaces = text
                return []
        return [{"content": text}] if text else []

    def _called(self, text: str, as_written: str) -> Pieces:
        calls = _calls(text, self._names)
        if calls is None:
            return self._content(as_written)
        wanted = calls if self._most is None else calls[: self._most - self._made]
        first, self._made, self._spaces = self._made, self._made + len(wanted), ""
        return [_call(first + i, *call) for i, call in enumerate(wanted)]

    def finish_reason(self, reason: str) -> str:
        """An end after calls is theirs."""
        return "tool_calls" if self._made and reason == "stop" else reason


def _begun(text: str, tag: str) -> int:
    """How many of the last characters may be the beginning of a tag."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)


def _call(index: int, name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"tool_calls": [{"index": index, "id": f"call_{uuid4().hex}", "type": "function", "function": function}]}


def _calls(text: str, names: Collection[str]) -> list[tuple[str, str]] | None:
    """Names and arguments of the call or the list of calls that a text is; None if it is neither, or empty."""
    try:
        found = json.loads(text)
        return [_checked(each, names) for each in (found if isinstance(found, list) else [found])] or None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def _checked(call: dict[str, Any], names: Collection[str]) -> tuple[str, str]:
    if call["name"] not in names:
        raise KeyError(call["name"])
    return call["name"], _arguments(call.get("arguments", call.get("parameters")))


def _arguments(given: Any) -> str:
    """A JSON object as text, which clients read as that and send back as that; nothing is an empty one."""
    value = json.loads(given) if given and isinstance(given, str) else given
    if value not in (None, "") and not isinstance(value, dict):
        raise TypeError(f"arguments are {type(value).__name__}")
    return whole_characters(json.dumps(value or {}, ensure_ascii=False, allow_nan=False))
