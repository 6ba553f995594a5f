"""Tool calls: what a chat asks for, and how they are read out of the model's text as it comes.

`none` hides the tools from the model. `auto` shows them; calls written as Hermes and Qwen models do, in
`<tool_call>` tags, become tool_calls, and all else is content. `required` and a named tool force the text into
one call of the right shape.
"""

import json
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol
from uuid import uuid4

from fullstride.llm.sampling_params import Structured
from fullstride.llm.server.errors import BadRequestError
from fullstride.llm.server.limits import Limits
from fullstride.llm.server.sampling import at_most
from fullstride.llm.server.schemas.chat import ChatRequest, NamedTool, Tool
from fullstride.llm.server.structured import json_schema

OPEN, CLOSE = "<tool_call>", "</tool_call>"
Pieces = list[dict[str, Any]]


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


def _call(index: int, name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"tool_calls": [{"index": index, "id": f"call_{uuid4().hex}", "type": "function", "function": function}]}


class Forced:
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


class Tagged:
    """Calls stand in tags; a tag that holds no call is content, as the model wrote it."""

    def __init__(self, names: set[str], most: int | None, inside: bool = False):
        """Read calls of these functions, at most so many; `inside`: the whole text is one call, without tags."""
        self._names, self._most, self._inside = names, most, inside
        self._held, self._calls, self._tagged = "", 0, not inside

    def read(self, text: str, last: bool) -> Pieces:
        """What is certain now: a tag may still begin in the text that is held back."""
        self._held += text
        pieces: Pieces = []
        while (step := self._next(last)) is not None:
            pieces += step
        return pieces

    def _next(self, last: bool) -> Pieces | None:
        tag = CLOSE if self._inside else OPEN
        before, found, after = self._held.partition(tag) if self._tagged else (self._held, "", "")
        if found:
            self._held, inside, self._inside = after, self._inside, not self._inside
            return self._calls_of(before, OPEN + before + CLOSE) if inside else self._content(before)
        if self._inside and not last:
            return None
        certain = len(before) if last else len(before) - _begun(before, OPEN)
        if not certain:
            return None
        self._held, inside, self._inside = before[certain:], self._inside, False
        return self._calls_of(before, OPEN * self._tagged + before) if inside else self._content(before[:certain])

    def _content(self, text: str) -> Pieces:
        # Between calls there are only line breaks.
        return [{"content": text}] if text and not (self._calls and text.isspace()) else []

    def _calls_of(self, text: str, as_written: str) -> Pieces:
        try:
            found = json.loads(text)
            calls = [self._arguments(each) for each in (found if isinstance(found, list) else [found])]
        except (ValueError, TypeError, KeyError, RecursionError):
            return self._content(as_written)
        pieces = []
        for name, arguments in calls:
            if self._most is None or self._calls < self._most:
                pieces.append(_call(self._calls, name, arguments))
                self._calls += 1
        return pieces

    def _arguments(self, call: dict[str, Any]) -> tuple[str, str]:
        if call["name"] not in self._names:
            raise KeyError(call["name"])
        arguments = call.get("arguments", call.get("parameters", {}))
        return call["name"], arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)

    def finish_reason(self, reason: str) -> str:
        """An end after calls is theirs."""
        return "tool_calls" if self._calls and reason == "stop" else reason


def _begun(text: str, tag: str) -> int:
    """How many of the last characters may be the beginning of a tag."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)


@dataclass(frozen=True)
class Asked:
    """What a chat asks for.

    Attributes:
        shown: to the model's template.
        shape: that the text must have.
        reader: makes a reader for one answer.

    """

    shown: list[Tool]
    shape: Structured | None
    reader: Any

    @classmethod
    def of(cls, body: ChatRequest, limits: Limits) -> "Asked":
        """Read the request.

        Raises:
            BadRequestError: if there are too many tools, or the tool to call is none of them.

        """
        tools = body.tools or []
        _check(body, tools, limits)
        names = {tool.function.name for tool in tools}
        if not tools or body.tool_choice == "none":
            return cls([], None, Plain)
        if isinstance(body.tool_choice, NamedTool):
            return cls(tools, *_named(body.tool_choice.function.name, tools))
        if body.tool_choice == "required":
            return cls(tools, _one_of(tools), partial(Tagged, names, 1, inside=True))
        return cls(tools, None, partial(Tagged, names, 1 if body.parallel_tool_calls is False else None))


def _check(body: ChatRequest, tools: list[Tool], limits: Limits) -> None:
    at_most("tools", len(tools), limits.tools, " tools")
    size = sum(len(json.dumps(tool.function.parameters)) for tool in tools if tool.function.parameters)
    at_most("tools", size, limits.schema_bytes, " bytes of parameters")
    if body.tool_choice not in (None, "none") and not tools:
        raise BadRequestError("'tool_choice' is only allowed when 'tools' are given.", param="tool_choice")


def _schema(tool: Tool) -> dict[str, Any]:
    return tool.function.parameters or {"type": "object", "properties": {}, "additionalProperties": False}


def _named(name: str, tools: list[Tool]) -> tuple[Structured, Any]:
    for tool in tools:
        if tool.function.name == name:
            return json_schema(_schema(tool)), partial(Forced, name)
    raise BadRequestError(f"Tool '{name}' is none of 'tools'.", param="tool_choice")


def _one_of(tools: list[Tool]) -> Structured:
    # A schema of its own for each tool: references in it are to its own root.
    rules = []
    for tool in tools:
        before = json.dumps(f'{{"name": {json.dumps(tool.function.name)}, "arguments": ')
        rules.append(f'{before} %json {json.dumps(_schema(tool))} "}}"')
    return Structured("grammar", "start: " + " | ".join(rules))
