"""Values and calls in Python's notation, as models write them."""

import ast
import re
from typing import Any

STRING = re.compile(r'"(?:[^"\\]|\\.)*"|\'(?:[^\'\\]|\\.)*\'', re.DOTALL)
# Backslashes before anything but these stand for themselves; Python would warn.
ESCAPE = re.compile(r"\\([4-7][0-7]{2}|.)", re.DOTALL)
ESCAPES = frozenset("\\'\"abfnrtvxuUN\n01234567")
CONSTANTS = {"true": True, "false": False, "null": None}
# What Python raises for a text that it cannot read.
UNREADABLE = (SyntaxError, ValueError, TypeError, MemoryError, RecursionError)


def parsed(text: str) -> ast.expr:
    """Parse an expression.

    Raises:
        SyntaxError, ValueError, MemoryError, RecursionError: if it is none.

    """
    return ast.parse(STRING.sub(lambda found: _quoted(found[0]), text.strip()), mode="eval").body


def _quoted(text: str) -> str:
    """Escape what models leave as it is in a text: line breaks, and backslashes of no escape."""
    written = ESCAPE.sub(lambda found: found[0] if found[1] in ESCAPES else f"\\{found[0]}", text)
    return written.replace("\r", "\\r").replace("\n", "\\n")


def value_of(node: ast.expr) -> Any:
    """Return the value of an expression that JSON could hold, too.

    Raises:
        ValueError: if it is anything else.

    """
    match node:
        case ast.Constant(value=str() | int() | float() | None):
            return node.value
        case ast.Name(id=name) if name in CONSTANTS:
            return CONSTANTS[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.List() | ast.Tuple():
            return [value_of(each) for each in node.elts]
        case ast.Dict():
            keys = [value_of(key) for key in node.keys if key is not None]
            if all(isinstance(key, str) for key in keys) and len(keys) == len(node.values):
                return dict(zip(keys, map(value_of, node.values), strict=True))
    raise ValueError("no value that JSON has")


def call_of(node: ast.expr) -> tuple[str, dict[str, Any]]:
    """Return the name and the arguments, all by their names, of a call.

    Raises:
        ValueError: if it is none.

    """
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.args:
        raise ValueError("no call by the names of its arguments")
    given = {each.arg: value_of(each.value) for each in node.keywords if each.arg is not None}
    if len(given) < len(node.keywords):
        raise ValueError("arguments without a name, or with the same one")
    return node.func.id, given
