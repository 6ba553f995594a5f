"""Calls of Qwen3-Coder: each parameter's value as it is, between tags."""

import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from fullstride.llm.server.tools.cursor import Calls, Cursor, NoCallError, Reading
from fullstride.llm.server.tools.formats.base import CallFormat
from fullstride.llm.server.tools.formats.python_values import UNREADABLE, parsed, value_of
from fullstride.llm.server.tools.parsers import arguments_of
from fullstride.llm.text.json_schema import resolved

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, NO_FUNCTION = "<function=", "</function>"
PARAMETER, NO_PARAMETER = "<parameter=", "</parameter>"


def read(cursor: Cursor, tag: str, schemas: Mapping[str, Any]) -> Reading[Calls]:
    """Read one call, whose first tag models leave out at times."""
    if tag == OPEN:
        yield from cursor.needs(FUNCTION)
    name = yield from cursor.word(">")
    if name not in schemas:
        raise NoCallError
    cursor.at += 1
    given: dict[str, Any] = {}
    while (yield from cursor.needs(PARAMETER, NO_FUNCTION)) == PARAMETER:
        key = yield from cursor.word(">")
        cursor.at += 1
        given[key] = typed((yield from _value(cursor)), _property(schemas[name], key), schemas[name])
    end = cursor.at
    yield from cursor.spaces()
    if not (yield from cursor.take(CLOSE)):
        cursor.at = end
    try:
        return [(name, arguments_of(given))]
    except (ValueError, TypeError, RecursionError):
        raise NoCallError from None


def _value(cursor: Cursor) -> Reading[str]:
    """Read a text up to the tag that ends it: one within it is not followed by another parameter, or the call's end."""
    start = cursor.at
    while True:
        yield from cursor.until(NO_PARAMETER)
        end = cursor.at
        yield from cursor.spaces()
        after = yield from cursor.ahead(PARAMETER, NO_FUNCTION)
        if after == NO_FUNCTION:
            cursor.at += len(NO_FUNCTION)
            yield from cursor.spaces()
            whole = yield from cursor.ahead(CLOSE)
            after = after if whole or CLOSE.startswith(cursor.rest) else None
        cursor.at = end
        if after:
            return cursor.text[start : end - len(NO_PARAMETER)].removeprefix("\n").removesuffix("\n")


def _property(schema: Any, key: str) -> Any:
    properties = schema.get("properties") if isinstance(schema, dict) else None
    return properties.get(key) if isinstance(properties, dict) else None


def typed(text: str, schema: Any, root: Any) -> Any:
    """Return the value that a text stands for: itself if the schema allows texts, or does not say, else what it spells.

    A text that spells no value stays one, which the schema then forbids.
    """
    kinds = set(_types(schema, root, 8))
    if not kinds or ("string" in kinds and not ("null" in kinds and text.strip() == "null")):
        return text
    for read in (lambda: json.loads(text, strict=False), lambda: value_of(parsed(text))):
        with contextlib.suppress(*UNREADABLE):
            value = read()
            json.dumps(value, allow_nan=False)
            return value
    return text


def _types(schema: Any, root: Any, deep: int) -> Iterator[str]:
    """Yield the types that a schema allows, by its keywords `type`, `enum` and `const`."""
    schema = resolved(schema, root)
    if not isinstance(schema, dict) or not deep:
        return
    named = schema.get("type") or []
    yield from named if isinstance(named, list) else [str(named)]
    values = schema.get("enum") or []
    values = [*(values if isinstance(values, list) else ()), *([schema["const"]] if "const" in schema else ())]
    yield from ("string" if isinstance(value, str) else "null" if value is None else "other" for value in values)
    for key in ("anyOf", "oneOf", "allOf"):
        for each in schema[key] if isinstance(schema.get(key), list) else ():
            yield from _types(each, root, deep - 1)


FORMAT = CallFormat(
    name="qwen3_coder",
    signs=(PARAMETER,),
    opens=(OPEN, FUNCTION),
    read=read,
)
