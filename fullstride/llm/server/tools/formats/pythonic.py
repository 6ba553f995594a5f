"""Calls of Llama 3.2 and 4: an answer that is a list of calls in Python, or one between `<|python_start|>` marks."""

import ast
import re
from collections.abc import Mapping
from typing import Any

from fullstride.llm.server.tools.cursor import Calls, Cursor, NoCallError, Reading
from fullstride.llm.server.tools.formats.base import CallFormat
from fullstride.llm.server.tools.formats.python_values import UNREADABLE, call_of, parsed
from fullstride.llm.server.tools.parsers import arguments_of

OPEN, CLOSE = "<|python_start|>", "<|python_end|>"
LIST = re.compile(r"(\[\s{0,64}([^\W\d]\w{0,255}\s{0,9}(\(|$)|$)|$)")


def read(cursor: Cursor, tag: str, schemas: Mapping[str, Any]) -> Reading[Calls]:
    """Read a list of calls."""
    yield from cursor.spaces()
    text = yield from _list(cursor)
    try:
        tree = parsed(text)
        found = [call_of(each) for each in tree.elts] if isinstance(tree, ast.List) else []
        calls = [(name, arguments_of(given)) for name, given in found if name in schemas]
    except UNREADABLE:
        raise NoCallError from None
    if not calls or len(calls) < len(found):
        raise NoCallError
    end = cursor.at
    yield from cursor.spaces()
    if not (yield from cursor.take(CLOSE)):
        cursor.at = end
    return calls


def _list(cursor: Cursor) -> Reading[str]:
    """Read up to the bracket that closes the first one; each character is looked at once."""
    start, depth, quote, escaped = cursor.at, 0, "", False
    while True:
        if cursor.at - start < len(OPEN) and not LIST.match(cursor.text, start):
            raise NoCallError
        while cursor.at < len(cursor.text):
            char, cursor.at = cursor.text[cursor.at], cursor.at + 1
            if quote:
                quote = "" if char == quote and not escaped else quote
                escaped = char == "\\" and not escaped
            elif char in "\"'":
                quote = char
            else:
                depth += (char in "([{") - (char in ")]}")
                if depth == 0:
                    return cursor.text[start : cursor.at]
        if cursor.last:
            raise NoCallError
        yield


FORMAT = CallFormat(
    name="pythonic",
    signs=("func_name1(param", OPEN),
    opens=(OPEN,),
    read=read,
    bare="[",
    marks=(OPEN, CLOSE),
)
