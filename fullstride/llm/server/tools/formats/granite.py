"""Calls of Granite 3 and Phi-4-mini: a JSON list after `<|tool_call|>`."""

from collections.abc import Mapping
from typing import Any

from fullstride.llm.server.tools.cursor import Calls, Cursor, NoCallError, Reading
from fullstride.llm.server.tools.formats.base import CallFormat
from fullstride.llm.server.tools.parsers import calls_of

OPEN, CLOSE = "<|tool_call|>", "<|/tool_call|>"


def read(cursor: Cursor, tag: str, schemas: Mapping[str, Any]) -> Reading[Calls]:
    """Read a list of calls, or one; Phi's has a tag behind it."""
    calls = calls_of((yield from cursor.json()), schemas)
    if calls is None:
        raise NoCallError
    end = cursor.at
    yield from cursor.spaces()
    if not (yield from cursor.take(CLOSE)):
        cursor.at = end
    return calls


FORMAT = CallFormat(
    name="granite",
    signs=(OPEN,),
    opens=(OPEN,),
    read=read,
    marks=(OPEN, CLOSE),
    call='WS? "[" WS? item (COMMA item)* WS? "]" "<|/tool_call|>"?',
)
