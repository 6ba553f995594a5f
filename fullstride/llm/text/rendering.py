"""Jinja in a sandbox, with the helpers that chat templates written for transformers rely on; runs confined.

The sandbox keeps templates from files, modules and Python's internals, but not from taking time and memory.
"""

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from fullstride.llm.text.confined import TooCostlyError

# Of one prompt: many times what the longest context holds.
MOST_CHARACTERS = 32 << 20


class _Generation(Extension):
    """`{% generation %}`, which marks what an assistant said for training; here it is plain content."""

    tags = {"generation"}  # noqa: RUF012, as Jinja declares it

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """Convert to JSON without Jinja's HTML escapes: models are trained on plain JSON."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def renderer(_: None) -> Callable[[tuple[str, Mapping[str, Any] | None]], str]:
    """Return a function that renders a template's text with variables; with None it only compiles."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    compiled = lru_cache(maxsize=16)(environment.from_string)

    def render(asked: tuple[str, Mapping[str, Any] | None]) -> str:
        text, given = asked
        template, pieces, size = compiled(text), [], 0
        for piece in () if given is None else template.generate(**given):
            pieces.append(piece)
            size += len(piece)
            if size > MOST_CHARACTERS:
                raise TooCostlyError(f"too costly: more than {MOST_CHARACTERS} characters")
        return "".join(pieces)

    return render
