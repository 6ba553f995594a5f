"""Calls of DeepSeek-R1, V3 and V3.1: each between marks, its arguments in a block of JSON or bare."""

from collections.abc import Mapping
from typing import Any

from fullstride.llm.server.tools.cursor import OBJECT, Calls, Cursor, NoCallError, Reading
from fullstride.llm.server.tools.formats.base import CallFormat
from fullstride.llm.server.tools.parsers import arguments_of

OPEN, CLOSE = "<\uff5ctool▁calls▁begin\uff5c>", "<\uff5ctool▁calls▁end\uff5c>"
CALL, BETWEEN, END = "<\uff5ctool▁call▁begin\uff5c>", "<\uff5ctool▁sep\uff5c>", "<\uff5ctool▁call▁end\uff5c>"
BLOCK = "```"


def read(cursor: Cursor, tag: str, schemas: Mapping[str, Any]) -> Reading[Calls]:
    """Read calls one after the other."""
    calls = yield from cursor.several(lambda: _one(cursor, schemas))
    end = cursor.at
    yield from cursor.spaces()
    if not (yield from cursor.take(CLOSE)):
        cursor.at = end
    return calls


def _one(cursor: Cursor, schemas: Mapping[str, Any]) -> Reading[Calls]:
    yield from cursor.needs(CALL)
    name = yield from cursor.word(BETWEEN)
    yield from cursor.take(BETWEEN)
    yield from cursor.spaces()
    # V3.1 has the name first; before, the kind of call came first, and the name after it.
    in_block = not (yield from cursor.ahead("{"))
    if in_block:
        name = yield from cursor.word("\n")
        yield from cursor.needs(f"{BLOCK}json")
    if name not in schemas:
        raise NoCallError
    text = yield from cursor.json(OBJECT)
    if in_block:
        yield from cursor.needs(BLOCK)
    yield from cursor.spaces()
    # Models that end with a call may leave out its mark.
    if not (yield from cursor.take(END)) and not END.startswith(cursor.rest):
        raise NoCallError
    try:
        return [(name, arguments_of(text))]
    except (ValueError, TypeError, RecursionError):
        raise NoCallError from None


FORMAT = CallFormat(
    name="deepseek_v3",
    signs=(OPEN,),
    opens=(OPEN,),
    read=read,
    marks=(OPEN, CLOSE, CALL, BETWEEN, END),
    call=f'(WS? "{CALL}" named "{END}")+ WS? "{CLOSE}"',
    named=lambda name, arguments: (
        f'"function{BETWEEN}" {name} "\\n{BLOCK}json\\n" {arguments} "\\n{BLOCK}" | {name} "{BETWEEN}" {arguments}'
    ),
)
