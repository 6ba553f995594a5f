"""Calls of Mistral: after `[TOOL_CALLS]` a JSON list, or a name and its arguments as newer models write them."""

from collections.abc import Mapping
from typing import Any

from fullstride.llm.server.tools.cursor import OBJECT, Calls, Cursor, NoCallError, Reading
from fullstride.llm.server.tools.formats.base import CallFormat
from fullstride.llm.server.tools.parsers import arguments_of, calls_of

OPEN, ARGUMENTS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


def read(cursor: Cursor, tag: str, schemas: Mapping[str, Any]) -> Reading[Calls]:
    """Read a list of calls, or one call by its name; each of several has a tag of its own."""
    yield from cursor.spaces()
    if (yield from cursor.ahead("[", "{")):
        calls = calls_of((yield from cursor.json()), schemas)
        if calls is None:
            raise NoCallError
        return calls
    name = yield from cursor.word("{", ARGUMENTS, CALL_ID)
    if name not in schemas:
        raise NoCallError
    if (yield from cursor.take(CALL_ID)):
        yield from cursor.word(ARGUMENTS)
    yield from cursor.take(ARGUMENTS)
    text = yield from cursor.json(OBJECT)
    try:
        return [(name, arguments_of(text))]
    except (ValueError, TypeError, RecursionError):
        raise NoCallError from None


FORMAT = CallFormat(
    name="mistral",
    signs=(OPEN,),
    opens=(OPEN,),
    read=read,
    marks=(OPEN, ARGUMENTS, CALL_ID),
    call='WS? "[" WS? item (COMMA item)* WS? "]" | named',
    named=lambda name, arguments: f'{name} ("[CALL_ID]" /[0-9A-Za-z_-]{{1,64}}/)? "[ARGS]"? {arguments}',
)
