"""Calls of Hermes, Qwen 2.5 and Qwen 3: JSON between `<tool_call>` tags."""

from collections.abc import Mapping
from typing import Any

from fullstride.llm.server.tools.cursor import Calls, Cursor, NoCallError, Reading
from fullstride.llm.server.tools.formats.base import CallFormat
from fullstride.llm.server.tools.parsers import calls_of

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def read(cursor: Cursor, tag: str, schemas: Mapping[str, Any]) -> Reading[Calls]:
    """Read one call, or a list of them."""
    text = yield from cursor.json()
    yield from cursor.spaces()
    found = yield from cursor.ahead(CLOSE, OPEN)
    # Models that end with a call, or go on with another one, may leave its tag open.
    if found is None and not CLOSE.startswith(cursor.rest):
        raise NoCallError
    if found != OPEN:
        cursor.at = min(len(cursor.text), cursor.at + len(CLOSE))
    calls = calls_of(text, schemas)
    if calls is None:
        raise NoCallError
    return calls


FORMAT = CallFormat(
    name="hermes",
    signs=(OPEN,),
    opens=(OPEN,),
    read=read,
    call='WS? item WS? "</tool_call>"',
)
