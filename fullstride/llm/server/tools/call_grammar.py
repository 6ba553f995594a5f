"""Grammars of tool calls in Lark: one call as the whole text, and calls in `<tool_call>` tags within free text."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from fullstride.llm.sampling_params import Structured
from fullstride.llm.text.grammar import GUIDANCE
from fullstride.llm.text.json_schema import supported

# As `HermesTools` reads a text: a tag within thoughts opens no call.
FREE_TEXT = r"""
TEXT: /(?s:.*)/
PLAIN: TEXT & ~/(?s:.*)<tool_call>(?s:.*)/
THOUGHT: TEXT & ~/(?s:.*)<\/think>(?s:.*)/
NEXT: PLAIN "<tool_call>"
"""
# A text without calls, and the text before the first call: of a prompt that ends within thoughts, and of others.
THINKING = r"""
NO_CALL: THOUGHT | THOUGHT "</think>" PLAIN
FIRST: THOUGHT "</think>" PLAIN "<tool_call>"
"""
NOT_THINKING = r"""
SAID: PLAIN & ~/\s*<think>(?s:.*)/
NO_CALL: SAID | /\s*<think>/ THOUGHT | /\s*<think>/ THOUGHT "</think>" PLAIN
FIRST: (SAID | /\s*<think>/ THOUGHT "</think>" PLAIN) "<tool_call>"
"""
# Models are trained on either order of the two keys.
CALL = r"""
WS: /[ \n\t]{1,24}/
NAME: "\"name\"" /[ \n\t]{0,24}:[ \n\t]{0,24}/
ARGUMENTS: "\"arguments\"" /[ \n\t]{0,24}:[ \n\t]{0,24}/
COMMA: /[ \n\t]{0,24},[ \n\t]{0,24}/
call: WS? "{" WS? function WS? "}" WS? "</tool_call>"
"""


def one_call(schemas: Mapping[str, Any]) -> Structured:
    """Return the grammar of a text that is one call of these functions, by the schemas of their arguments."""
    rules = []
    for name, schema in schemas.items():
        before = f'{{"name": {json.dumps(name)}, "arguments": '
        rules.append(f'{json.dumps(before)} {_json(schema)} "}}"')
    return _grammar([f"start: {' | '.join(rules)}"])


def calls_in_text(schemas: Mapping[str, Any], *, single: bool, thinking: bool) -> Structured:
    """Return the grammar of free text in which each `<tool_call>` opens a call of these functions.

    Args:
        schemas: of the functions' arguments.
        single: whether there is one call at most.
        thinking: whether the prompt ends within thoughts.

    """
    more = "" if single else "(NEXT call)*"
    start = f"start: NO_CALL | FIRST call {more} PLAIN?"
    return _grammar([start, FREE_TEXT, THINKING if thinking else NOT_THINKING, CALL, *_functions(schemas)])


def calls_or_json(schemas: Mapping[str, Any], answer: Any, *, single: bool) -> Structured:
    """Return the grammar of a text that is calls of these functions, or else JSON of the schema `answer`."""
    more = "" if single else '(WS? "<tool_call>" call)*'
    start = f'start: answer | "<tool_call>" call {more}'
    return _grammar([start, f"answer: {_json(answer)}", CALL, *_functions(schemas)])


def _functions(schemas: Mapping[str, Any]) -> Iterable[str]:
    yield "function: " + " | ".join(f"function_{i}" for i in range(len(schemas)))
    for i, (name, schema) in enumerate(schemas.items()):
        named = f"NAME {json.dumps(json.dumps(name, ensure_ascii=False), ensure_ascii=False)}"
        yield f"function_{i}: {named} COMMA ARGUMENTS arguments_{i} | ARGUMENTS arguments_{i} COMMA {named}"
        yield f"arguments_{i}: {_json(schema)}"


def _json(schema: Any) -> str:
    """Write a schema of its own, to whose root its references are."""
    made = supported(schema).schema
    # As in a schema that is not part of a grammar.
    return f"%json {json.dumps(made | {'x-guidance': GUIDANCE} if isinstance(made, dict) else made)}"


def _grammar(rules: Iterable[str]) -> Structured:
    return Structured("grammar", "\n".join(rules), wide=True)
