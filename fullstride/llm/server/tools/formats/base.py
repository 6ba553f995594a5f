"""A format of tool calls, as models of one family write them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fullstride.llm.server.tools.cursor import Calls, Cursor, Reading
from fullstride.llm.server.tools.parsers import ToolParser


@dataclass(frozen=True)
class CallFormat:
    """Format of the calls in an answer.

    Attributes:
        name: vLLM's name of the parser.
        signs: texts of which a chat template for it has one.
        opens: tags that open calls.
        read: reads the calls after a tag, given the place, the tag (empty at the beginning of an answer) and the
            schemas of the functions' arguments by their names; raises NoCallError if there are none.
        bare: characters of which one begins an answer that is calls without a tag.
        marks: special tokens that are a part of calls, and so of the text.
        call: rules of Lark for `call`, what follows a tag, from `function`, `item` and `arguments_0`, ...; None if no
            grammar can be formed.
        named: function from a function's name, as Lark writes texts, and the rule of its arguments to another way to
            write a call, which becomes the rule `named`.
        parser: makes a parser of whole answers, from the schemas, the most calls and whether reasoning is separated,
            if calls are not all that a model writes in a format of its own.

    """

    name: str
    signs: tuple[str, ...]
    opens: tuple[str, ...]
    read: Callable[[Cursor, str, Mapping[str, Any]], Reading[Calls]]
    bare: str = ""
    marks: tuple[str, ...] = ()
    call: str | None = None
    named: Callable[[str, str], str] | None = None
    parser: Callable[[Mapping[str, Any], int | None, bool], ToolParser] | None = None
