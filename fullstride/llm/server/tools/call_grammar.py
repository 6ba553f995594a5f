"""Grammars of tool calls in Lark: one call as the whole text, and calls after a format's tags within free text."""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from fullstride.llm.sampling_params import Structured
from fullstride.llm.server.tools.formats.base import CallFormat
from fullstride.llm.server.tools.reasoning import ThinkTags
from fullstride.llm.text.grammar import GUIDANCE
from fullstride.llm.text.json_schema import supported

# As `CallParser` reads a text: a tag within thoughts opens no call, and without a tag an answer may begin with one,
# and a semicolon after that with the next.
FREE_TEXT = r"""
TEXT: /(?s:.*)/
PLAIN: TEXT & ~/(?s:.*)(OPENS)(?s:.*)/
START: PLAIN NOT_BARE
REST: PLAIN NOT_AGAIN
THOUGHT: TEXT & ~/(?s:.*)CLOSE(?s:.*)/
NEXT: REST "TAG"
"""
# A text without calls, and the text before the first call: of a prompt that ends within thoughts, and of others.
THINKING = r"""
NO_CALL: THOUGHT | THOUGHT /CLOSE/ START
FIRST: THOUGHT /CLOSE/ START "TAG"
ALONE: THOUGHT /CLOSE\s*/
"""
NOT_THINKING = r"""
SAID: START & ~/\s*OPEN(?s:.*)/
NO_CALL: SAID | /\s*OPEN/ THOUGHT | /\s*OPEN/ THOUGHT /CLOSE/ START
FIRST: (SAID | /\s*OPEN/ THOUGHT /CLOSE/ START) "TAG"
ALONE: /\s*/ | /\s*OPEN/ THOUGHT /CLOSE\s*/
"""
# Models are trained on either order of the two keys.
ITEM = r"""
WS: /[ \n\t]{1,24}/
NAME: "\"name\"" /[ \n\t]{0,24}:[ \n\t]{0,24}/
ARGUMENTS: /"(arguments|parameters)"[ \n\t]{0,24}:[ \n\t]{0,24}/
COMMA: /[ \n\t]{0,24},[ \n\t]{0,24}/
item: "{" WS? function WS? "}"
"""


def one_call(schemas: Mapping[str, Any]) -> Structured:
    """Return the grammar of a text that is one call of these functions, by the schemas of their arguments."""
    rules = []
    for name, schema in schemas.items():
        before = f'{{"name": {json.dumps(name)}, "arguments": '
        rules.append(f'{json.dumps(before)} {_json(schema)} "}}"')
    return _grammar([f"start: {' | '.join(rules)}"])


def calls_in_text(
    form: CallFormat, schemas: Mapping[str, Any], *, single: bool, thinking: bool, tags: ThinkTags
) -> Structured:
    """Return the grammar of free text in which each tag of a format opens a call of these functions.

    Args:
        form: that has a grammar.
        schemas: of the functions' arguments.
        single: whether there is one call at most.
        thinking: whether the prompt ends within thoughts.
        tags: around thoughts.

    """
    more = "" if single else "(NEXT call)*"
    start = f"start: NO_CALL | FIRST call {more} REST?" + f" | ALONE call {more} REST?" * bool(form.bare)
    # Of regular expressions, but for the tag, which stands in a text.
    written = {
        "OPENS": "|".join(map(_escaped, form.opens)),
        "NOT_BARE": _not_from(form.bare),
        "NOT_AGAIN": _not_from(";" if form.bare else ""),
        "OPEN": _escaped(tags.open),
        "CLOSE": _escaped(tags.close),
        "TAG": form.opens[0],
    }
    names = re.compile("|".join(sorted(written, key=len, reverse=True)))
    rules = FREE_TEXT + (THINKING if thinking else NOT_THINKING)
    text = names.sub(lambda found: written[found[0]], rules)
    return _grammar([start, text, *_calls(form, schemas)])


def calls_or_json(form: CallFormat, schemas: Mapping[str, Any], answer: Any, *, single: bool) -> Structured:
    """Return the grammar of a text that is calls of these functions, or else JSON of the schema `answer`."""
    tag = json.dumps(form.opens[0], ensure_ascii=False)
    more = "" if single else f"(WS? {tag} call)*"
    start = f"start: answer | {tag} call {more}"
    return _grammar([start, f"answer: {_json(answer)}", *_calls(form, schemas)])


def _not_from(characters: str) -> str:
    return rf" & ~/\s*[{re.escape(characters)}](?s:.*)/" if characters else ""


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", r"\/")


def _calls(form: CallFormat, schemas: Mapping[str, Any]) -> Iterable[str]:
    yield ITEM
    yield f"call: {form.call}"
    yield "function: " + " | ".join(f"function_{i}" for i in range(len(schemas)))
    if form.named is not None:
        names = [json.dumps(name, ensure_ascii=False) for name in schemas]
        yield "named: " + " | ".join(form.named(name, f"arguments_{i}") for i, name in enumerate(names))
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
