"""Calls of Llama 3: an answer that is one JSON object, or several with semicolons between them."""

from collections.abc import Mapping
from typing import Any

from fullstride.llm.server.tools.cursor import Calls, Cursor, NoCallError, Reading
from fullstride.llm.server.tools.formats.base import CallFormat
from fullstride.llm.server.tools.parsers import calls_of

OPEN = "<|python_tag|>"


def read(cursor: Cursor, tag: str, schemas: Mapping[str, Any]) -> Reading[Calls]:
    """Read calls; text after them is content."""
    start = cursor.at

    def one() -> Reading[Calls]:
        if cursor.at > start:
            yield from cursor.needs(";")
        calls = calls_of((yield from cursor.json()), schemas)
        if calls is None:
            raise NoCallError
        return calls

    return (yield from cursor.several(one))


FORMAT = CallFormat(
    name="llama3_json",
    signs=('{"name": function name, "parameters"', OPEN),
    opens=(OPEN,),
    read=read,
    bare="{[",
    marks=(OPEN,),
    call='WS? item (WS? ";" WS? item)*',
)
