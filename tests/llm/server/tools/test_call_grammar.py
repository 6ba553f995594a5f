import json
import random
import re

import jsonschema_rs
import numpy as np
import pytest

from fullstride.llm.server.tools.call_grammar import calls_in_text, calls_or_json
from fullstride.llm.server.tools.call_parser import CallParser, CallsOrContent
from fullstride.llm.server.tools.formats import FORMATS
from fullstride.llm.server.tools.parsers import ToolParser
from fullstride.llm.server.tools.reasoning import THINK
from fullstride.llm.text.grammar import Compiler
from tests.llm.server.tools.writers import BARE, WRITERS
from tests.llm.text.test_grammar import TOKENIZER, allowed

HERMES = FORMATS["hermes"]
ARGUMENTS = {"enum": ["a", "東京"]}
SCHEMAS = {
    "wet": {"type": "object", "properties": {"x": ARGUMENTS}, "required": ["x"], "additionalProperties": False},
    'ü"': {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"type": "boolean"}}},
}
GOOD = [
    '{"name": "wet", "arguments": {"x": "a"}}',
    '\n{"arguments":{"x":"東京"},\n "name":"wet"}\n',
    '{"name": "ü\\"", "arguments": {"n": true}}',
]
BAD = ['{"name": "wet", "arguments": {"x": "b"}}', '{"name": "dry", "arguments": {}}', "[]", "", '{"name": "wet"}']
BAD += ['{"name": "ü\\"", "arguments": {"n": 1}}', '{"name": "wet", "arguments": {"x": "a"}']
FREE = ["so ", "<think>", "</think>", "<tool", "</tool_call>", "\n", "é", "{}"]
CALLS = [f"<tool_call>{call}</tool_call>" for call in GOOD + BAD]


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return Compiler(TOKENIZER)


def _accepts(matcher, text: str) -> bool:
    ids = TOKENIZER.encode(text, False)
    return all(matcher.advance(token) for token in ids) and matcher.advance(TOKENIZER.eos[0])


def _right(text: str, thinking: bool) -> bool:
    """Return whether each tag outside of thoughts opens a good call."""
    if thinking or re.match(r"\s*<think>", text):
        _, _, text = text.partition("</think>")
    good = "|".join(map(re.escape, GOOD))
    return bool(re.fullmatch(rf"(?s:(?!<tool_call>).|<tool_call>({good})</tool_call>)*", text))


def _found(parser: ToolParser, text: str) -> list[dict]:
    pieces = parser.read(text, last=True)
    return [call["function"] for piece in pieces for call in piece.get("tool_calls", ())]


@pytest.mark.parametrize("thinking", [False, True])
def test_each_tag_opens_a_call_outside_of_thoughts(compiler, thinking, seed):
    draw = random.Random(seed)
    shape = calls_in_text(HERMES, SCHEMAS, single=False, thinking=thinking, tags=THINK)
    seen = set()
    for _ in range(300):
        pieces = draw.choices(FREE, k=draw.randrange(4)) + draw.choices(CALLS, k=draw.randrange(3))
        text = "".join(draw.sample(pieces, len(pieces)))
        right = _right(text, thinking)
        assert _accepts(compiler.matcher(shape), text) is right, text
        if right and "<think>" not in text and not thinking:
            names = re.findall(r'"name": ?"((?:[^"\\]|\\.)*)"', text.replace('"name":"', '"name": "'))
            assert [call["name"] for call in _found(CallParser(HERMES, SCHEMAS), text)] == [
                json.loads(f'"{name}"') for name in names
            ]
        seen.add(right)
    assert seen == {False, True}


def test_one_call_where_no_more_are_wanted(compiler):
    for single in (False, True):
        shape = calls_in_text(HERMES, SCHEMAS, single=single, thinking=False, tags=THINK)
        assert _accepts(compiler.matcher(shape), f"a {CALLS[0]} b")
        assert _accepts(compiler.matcher(shape), CALLS[0] + CALLS[1]) is not single


def test_calls_or_an_answer_of_a_schema(compiler, seed):
    answer = {"type": "object", "properties": {"tag": {"enum": [CALLS[0], 1]}}, "additionalProperties": False}
    shape, draw = calls_or_json(HERMES, SCHEMAS, answer, single=False), random.Random(seed)
    for text, calls in ((json.dumps({"tag": CALLS[0]}), 0), (CALLS[0], 1), (CALLS[0] + "\n" + CALLS[2], 2)):
        assert _accepts(compiler.matcher(shape), text)
        parser, given = CallsOrContent(HERMES, SCHEMAS), text
        pieces = []
        while given:
            cut = draw.randint(1, 9)
            pieces += parser.read(given[:cut], last=cut >= len(given))
            given = given[cut:]
        assert sum("tool_calls" in piece for piece in pieces) == calls
        assert "".join(piece.get("content", "") for piece in pieces) == (text if not calls else "")
    for text in ("so", f"so {CALLS[0]}", '{"tag": 2}', CALLS[len(GOOD)], f"{CALLS[0]} so"):
        assert not _accepts(compiler.matcher(shape), text)


def test_tokens_drawn_under_the_mask_make_calls_of_the_schemas(compiler, seed):
    rng = np.random.default_rng(seed)
    schemas = {name: schema | {"additionalProperties": False} for name, schema in SCHEMAS.items()}  # else they go on
    checks = {name: jsonschema_rs.validator_for(schema) for name, schema in schemas.items()}
    for _ in range(5):
        matcher = compiler.matcher(calls_in_text(HERMES, schemas, single=False, thinking=False, tags=THINK))
        begun = TOKENIZER.encode("so <tool_call>", False)
        assert all(map(matcher.advance, begun))
        ids = list(begun)
        while not (text := TOKENIZER.decode(ids)).endswith("</tool_call>"):
            ids.append(int(rng.choice(allowed(matcher))))
            assert matcher.advance(ids[-1])
            assert len(ids) < 600
        (call,) = _found(CallParser(HERMES, schemas), text)
        assert checks[call["name"]].is_valid(json.loads(call["arguments"])), text


STRICT = {name: {"type": "object", "properties": {"x": ARGUMENTS}, "required": ["x"], "additionalProperties": False}
          for name in ("wet", "dry")}  # fmt: skip
HELD = [writer for writer, (name, _) in WRITERS.items() if FORMATS[name].call is not None]


@pytest.mark.parametrize("writer", HELD)
def test_a_grammar_of_each_format_holds_its_calls(compiler, writer, seed):
    draw = random.Random(seed)
    name, write = WRITERS[writer]
    form, bare = FORMATS[name], writer in BARE
    shapes = {think: calls_in_text(form, STRICT, single=False, thinking=think, tags=THINK) for think in (False, True)}
    seen = set()
    for _ in range(24):
        calls: list[tuple[str, dict]] = [
            (draw.choice(["wet", "dry"]), {"x": draw.choice(["a", "東京"])}) for _ in range(draw.randint(1, 2))
        ]
        before, after, thinking = (
            draw.choice(["", "so, "]) * (not bare),
            draw.choice(["", " done"]),
            draw.random() < 0.5,
        )
        good = draw.random() < 0.6
        if not good:
            draw.choice(calls)[1]["x"] = draw.choice(["b", 1])
        thought = write([("wet", {})]) + "</think>"
        text = (thought if thinking else draw.choice(["", "<think>" + thought])) + before + write(calls) + after
        assert _accepts(compiler.matcher(shapes[thinking]), text) is good, text
        parser = CallParser(form, STRICT, thinking=thinking)
        assert [call["name"] for call in _found(parser, text)] == [name for name, _ in calls]
        plain = (thought if thinking else "") + "no, a < b or [1]"
        assert _accepts(compiler.matcher(shapes[thinking]), plain)
        seen.add(good)
    assert seen == {False, True}
    unknown = write([("nobody", {"x": "a"})])
    assert not _accepts(compiler.matcher(shapes[False]), unknown)
