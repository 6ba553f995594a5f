"""Calls in each format, with hostile arguments and in pieces of any size, are what the model wrote."""

import json
import random
import re
from typing import Any

import pytest

from fullstride.errors import ConfigError
from fullstride.llm.server.tools.answers import AnswerFormat
from fullstride.llm.server.tools.formats import FORMATS, format_of
from fullstride.llm.server.tools.parsers import ToolParser
from fullstride.llm.text.chat_template import ChatTemplate
from tests.llm.server.tools.writers import BARE, WRITERS

ANY: dict[str, Any] = {"type": ["number", "boolean", "null", "object", "array"]}
STRING = {"type": "string"}
SCHEMAS = {
    name: {"type": "object", "properties": {"text": STRING, "more": STRING, "value": ANY}}
    for name in ("weather", "get_time", "get")
}
# Of every format what ends a call, and what begins one; in an argument it is text.
HOSTILE = [tag for form in FORMATS.values() for tag in (*form.opens, *form.marks)]
HOSTILE += [
    "</tool_call>",
    "</parameter>",
    "</function>",
    "```",
    "]",
    "}",
    ")",
    ";",
    '"',
    "'",
    "\\",
    "\n",
    "é",
    "👋",
    "<",
]
HOSTILE += ["<parameter", "None", "<think>", "</think>", "[1]", " ", ", ", "=", "a", "{", "(", "[", "\\d", "\t"]
PROSE = ["so ", "I see. ", "\n", "<", "[TOOL", "<tool", "é ", "]", "</tool_call>", "a < b; ", "</think", "`"]


def form(name: str) -> AnswerFormat:
    return AnswerFormat.of(name, None)


def read(parser: ToolParser, pieces: list[str]) -> tuple[str, str, list[tuple[str, Any]]]:
    """Reasoning, content and calls of a text in pieces."""
    found = [each for i, piece in enumerate(pieces) for each in parser.read(piece, i == len(pieces) - 1)]
    calls = [call for each in found for call in each.get("tool_calls", ())]
    assert [call["index"] for call in calls] == list(range(len(calls)))
    assert parser.finish_reason("stop") == ("tool_calls" if calls else "stop")
    thought, text = ("".join(each.get(key, "") for each in found) for key in ("reasoning_content", "content"))
    return thought, text, [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


def pieces_of(text: str, draw: random.Random) -> list[str]:
    cuts = sorted(draw.sample(range(1, len(text)), min(len(text) - 1, draw.randrange(12)))) if len(text) > 1 else []
    return [text[i:j] for i, j in zip([0, *cuts], [*cuts, None], strict=True)]


def arguments(draw: random.Random) -> dict[str, Any]:
    text = "".join(draw.choices(HOSTILE, k=draw.randrange(8)))
    values = [1.5, -3, True, None, [1, "x]"], {"a": {"b": "})"}}, [], {}]
    given = {"text": text, "more": draw.choice(["", "plain", "5", "true"]), "value": draw.choice(values)}
    return {key: given[key] for key in draw.sample(sorted(given), draw.randrange(4))}


def calls_of(draw: random.Random, count: int) -> list[tuple[str, dict[str, Any]]]:
    return [(draw.choice(list(SCHEMAS)), arguments(draw)) for _ in range(count)]


def ambiguous(calls: list[tuple[str, dict[str, Any]]]) -> bool:
    """Return whether a value of Qwen3-Coder's, which has no escapes, holds what ends it."""
    texts = (value for _, given in calls for value in given.values() if isinstance(value, str))
    return any(re.search(r"</parameter>\s*(<parameter=|</function>\s*(</tool_call>|$))", text) for text in texts)


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("thinking", [None, False, True])
def test_every_call_is_read_whatever_its_arguments_and_its_pieces(writer, thinking, seed):
    draw = random.Random(seed)
    name, write = WRITERS[writer]
    for _ in range(15):
        calls = calls_of(draw, draw.randint(1, 3))
        if name == "qwen3_coder" and ambiguous(calls):
            continue
        before = "" if writer in BARE else "".join(draw.choices(PROSE[:3], k=draw.randrange(3)))
        after = draw.choice(["", " Done."]) if name != "llama3_json" else ""
        text, thought = before + write(calls) + after, "".join(draw.choices(HOSTILE, k=3)) + write(calls)
        thought = thought.replace("</think>", "")
        if thinking is not None:
            text = ("" if thinking else "\n<think>") + thought + "</think>" + text
        makes = lambda: form(name).parser(SCHEMAS, thinking=bool(thinking), separates=thinking is not None)  # noqa: E731
        for pieces in (list(text), [text], pieces_of(text, draw)):
            reasoning, content, found = read(makes(), pieces)
            assert found == calls, text
            assert reasoning == (thought if thinking is not None else "")
            assert content == before + after


@pytest.mark.parametrize("name", FORMATS)
def test_any_text_is_read_alike_whatever_its_pieces(name, seed):
    draw, writes = random.Random(seed), [write for kind, write in WRITERS.values() if kind == name]
    for _ in range(40):
        parts = draw.choices(PROSE + HOSTILE, k=draw.randrange(9))
        parts += [part for write in writes for part in pieces_of(write(calls_of(draw, 2)), draw)]
        text = "".join(draw.sample(parts, draw.randrange(len(parts) + 1)) if draw.random() < 0.5 else parts)
        if not text:
            continue
        settings = {"thinking": draw.random() < 0.3, "separates": draw.random() < 0.5}
        whole = read(form(name).parser(SCHEMAS, **settings), [text])
        assert read(form(name).parser(SCHEMAS, **settings), list(text)) == whole, text
        assert read(form(name).parser(SCHEMAS, **settings), pieces_of(text, draw)) == whole, text
        if not whole[2] and name != "gpt_oss":
            assert len(whole[0] + whole[1]) >= len(text) - len("<think></think>") - len(text) * settings["separates"]
            assert settings["separates"] or whole[1] == text


@pytest.mark.parametrize("writer", WRITERS)
def test_no_more_calls_than_are_wanted_and_none_of_unknown_functions(writer, seed):
    draw = random.Random(seed)
    name, write = WRITERS[writer]
    calls = [(name, {}) for name in ("weather", "get", "get_time")]
    assert read(form(name).parser(SCHEMAS, most=2), list(write(calls)))[2] == calls[:2]
    unknown = write([("nobody", {"text": "x"})])
    assert read(form(name).parser(SCHEMAS), pieces_of(unknown, draw)) == ("", unknown, [])


@pytest.mark.parametrize("writer", sorted(BARE))
def test_a_call_without_a_tag_is_one_at_the_beginning_only(writer):
    name, write = WRITERS[writer]
    text = write([("weather", {"text": "x"})])
    assert read(form(name).parser(SCHEMAS), list("For example: " + text))[1:] == ("For example: " + text, [])
    assert len(read(form(name).parser(SCHEMAS), list("\n " + text))[2]) == 1


@pytest.mark.parametrize("writer", sorted(BARE))
def test_an_answer_that_has_begun_has_no_call_without_a_tag(writer):
    name, write = WRITERS[writer]
    text = write([("weather", {"text": "x"})])
    for said, calls in (
        ("", 1),
        ("<think>so", 0),
        ("<think>so</think>\n", 1),
        ("Here: ", 0),
        ("<think></think>It is ", 0),
    ):
        parser = form(name).after(said).parser(SCHEMAS, thinking=said == "<think>so")
        assert len(read(parser, list(text))[2]) == calls


def test_values_without_quotes_have_the_types_of_their_schema():
    properties = {
        "n": {"type": "integer"},
        "flag": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
        "text": {"type": "string"},
        "maybe": {"type": ["string", "null"]},
        "ref": {"$ref": "#/$defs/list"},
        "choice": {"enum": ["1", "2"]},
        "open": {},
    }
    schema = {"type": "object", "properties": properties, "$defs": {"list": {"type": "array"}}}
    given = {"n": "5", "flag": "True", "text": "5", "maybe": "null", "ref": "[1, 'a']", "choice": "1", "open": "7"}
    text = WRITERS["qwen3_coder"][1]([("f", given | {"other": "x"})])
    ((_, found),) = read(form("qwen3_coder").parser({"f": schema}), [text])[2]
    assert found == {
        "n": 5, "flag": True, "text": "5", "maybe": None, "ref": [1, "a"], "choice": "1", "open": "7", "other": "x",
    }  # fmt: skip
    text = WRITERS["qwen3_coder"][1]([("f", {"n": "five", "flag": "NaN"})])
    ((_, found),) = read(form("qwen3_coder").parser({"f": schema}), [text])[2]
    assert found == {"n": "five", "flag": "NaN"}  # as it is: the check against the schema says so


@pytest.mark.parametrize(
    "text",
    ["[f(1)]", "[f(a=g())]", "[f(a=b'x')]", "[f(a=__import__)]", "[f(**{})]", "[f(a=1, a=2)]", "[f(a={1})]", "[f.g()]"],
)
def test_what_is_no_call_in_python_is_content(text):
    assert read(form("pythonic").parser({"f": True}), list(text)) == ("", text, [])


CHANNELS = "<|channel|>analysis<|message|>I {thought}.<|end|><|start|>assistant<|channel|>"


@pytest.mark.parametrize("separates", [False, True])
def test_channels_of_gpt_oss(separates, seed):
    draw = random.Random(seed)
    thought = "think to=functions.get <|message|> of it"
    begun = CHANNELS.format(thought=thought)
    call = "commentary to=functions.get <|constrain|>json<|message|>" + json.dumps({"text": "<|call|> é"})
    made, unknown = [("get", {"text": "<|call|> é"})], "commentary to=functions.nobody<|message|>{}"
    for end, content, calls in (
        ("final<|message|>Hello < you<|", "Hello < you<|", []),
        (call, "", made),
        ("commentary<|message|>I look.<|end|><|start|>assistant<|channel|>" + call, "I look.", made),
        (unknown, "<|start|>assistant<|channel|>" + unknown, []),
        ("final", "", []),
    ):
        raw = "" if separates else begun[: begun.index("<|start|>")]
        for pieces in (list(begun + end), [begun + end], pieces_of(begun + end, draw)):
            parser = form("gpt_oss").parser(SCHEMAS, separates=separates)
            assert read(parser, pieces) == (f"I {thought}." * separates, raw + content, calls)
    assert read(form("gpt_oss").parser({}), list("No channels at all")) == ("", "No channels at all", [])


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("", "hermes"),
        ("<tool_call>", "hermes"),
        ("<tool_call>\n<function=x>\n<parameter=y>", "qwen3_coder"),
        ("[TOOL_CALLS]", "mistral"),
        ('{"name": function name, "parameters": x}', "llama3_json"),
        ("<|tool_call|>", "granite"),
        ("<\uff5ctool▁calls▁begin\uff5c>", "deepseek_v3"),
        ("[func_name1(param1=value1)]", "pythonic"),
        ("<|channel|>", "gpt_oss"),
    ],
)
def test_the_template_shows_the_format(template, name):
    assert format_of("auto", ChatTemplate(template, {})).name == name
    assert format_of("pythonic", ChatTemplate(template, {})).name == "pythonic"


def test_a_format_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="--tool-parser"):
        format_of("nonsense", None)
