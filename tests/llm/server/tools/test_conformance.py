import json
from typing import Any

import openai
import pytest

from fullstride.errors import ConfigError
from fullstride.llm.sampling_params import Structured
from fullstride.llm.server.tools.conformance import check_of, refused
from fullstride.llm.server.tools.shapes import schema_of
from fullstride.llm.text.grammar import Compiler
from tests.llm.server.conftest import connected
from tests.llm.server.fake_engine import FakeEngine
from tests.llm.server.live import fake_server
from tests.llm.text.test_grammar import TOKENIZER

HELLO: Any = [{"role": "user", "content": "hello"}]


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


UNIQUE = _object(tags={"type": "array", "items": {"type": "integer"}, "uniqueItems": True})
LOOKING = _object(code={"type": "string", "pattern": "^(?!0)[0-9]+$"})
BAD, GOOD = '{"tags": [7, 7]}', '{"tags": [7, 8]}'


@pytest.fixture
def says():
    """A server of a model that says this."""
    return lambda text: fake_server(FakeEngine(script=lambda prompt, params, index: text.encode()))


def _asked(live, **asked: Any) -> list[Any]:
    """The choice, whole, and out of a stream's last event."""
    with connected(live) as client:
        whole = client.chat.completions.create(model="fake", messages=HELLO, **asked).choices[0]
        stream = client.chat.completions.create(model="fake", messages=HELLO, stream=True, **asked)
        return [whole, [event.choices[0] for event in stream][-1]]


def _format(schema: dict) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


@pytest.mark.parametrize(("text", "said"), [(BAD, ["/tags: [7,7] has non-unique elements"]), (GOOD, None)])
def test_what_no_grammar_holds_is_checked_and_said(says, text, said):
    with says(text) as live:
        for choice in _asked(live, response_format=_format(UNIQUE)):
            assert (choice.model_extra or {}).get("schema_errors") == said
            assert choice.finish_reason == "stop"
        with connected(live) as client:
            body = {"structured_outputs": {"json": UNIQUE}}
            (choice,) = client.completions.create(model="fake", prompt="x", extra_body=body, max_tokens=99).choices
            assert (choice.model_extra or {}).get("schema_errors") == said


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "tag"}}])
def test_arguments_of_a_forced_call_are_checked(says, choice):
    tools = [{"type": "function", "function": {"name": name, "parameters": each}} for name, each in
             (("tag", UNIQUE), ("look", LOOKING))]  # fmt: skip
    text = BAD if choice != "required" else f'{{"name": "tag", "arguments": {BAD}}}'
    with says(text) as live:
        for answer in _asked(live, tools=tools, tool_choice=choice):
            said = ["tool_calls.0.function.arguments/tags: [7,7] has non-unique elements"]
            assert answer.model_extra["schema_errors"] == said


def test_a_text_that_was_cut_off_is_not_checked(says):
    with says(BAD) as live:
        for choice in _asked(live, response_format=_format(UNIQUE), max_tokens=9):
            assert choice.finish_reason == "length"
            assert "schema_errors" not in choice.model_extra
        for choice in _asked(live, response_format=_format(UNIQUE), stop="]"):
            assert "cannot be checked" in choice.model_extra["schema_errors"][0]


@pytest.mark.parametrize(
    ("schema", "text", "right"),
    [
        (LOOKING, '{"code": "012"}', False),
        (LOOKING, '{"code": "12"}', True),
        (_object(a={"oneOf": [{"type": "string"}, {"maxLength": 2}]}), '{"a": "x"}', False),
        (_object(a={"oneOf": [{"type": "string"}, {"maxLength": 2}]}), '{"a": "xyz"}', True),
        ({"if": {"required": ["a"]}, "then": {"required": ["b"]}}, '{"a": 1}', False),
        (_object(a={"contains": {"const": 3}}), '{"a": [1, 2]}', False),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, '{"a": 1}', False),
        (_object(a={"type": "number", "maximum": 1e30}), '{"a": 1e31}', False),
    ],
)
def test_checks(schema, text, right):
    check = check_of(Structured("json_schema", json.dumps(schema)), None)
    assert check is not None
    assert (check(text, True) == []) is right


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        (
            _object(a={"$ref": "https://example.org/x.json"}) | {"uniqueItems": True},
            "example.org.* is not within the schema",
        ),
        (_object(a={"pattern": "(?=a"}), 'not a "regex"'),
        (_object(a={"minLength": -1}) | {"uniqueItems": True}, "less than the minimum"),
    ],
)
def test_what_cannot_be_checked_is_refused_before(schema, why):
    with pytest.raises(ConfigError, match=f"it is not a JSON schema: .*{why}"):
        check_of(Structured("json_schema", json.dumps(schema)), None)


def test_a_regular_expression_ends():
    check = check_of(Structured("json_schema", json.dumps(_object(a={"pattern": "^(?=(a+)+$)(a|a)*b\\\\1$"}))), None)
    assert check is not None
    assert check(json.dumps({"a": "a" * 5000}), True) != []


def test_an_exponential_check_ends():
    # Each of 60 definitions refers to the next one twice.
    doubled = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(60)} | {"d60": {}}
    schema = {"type": "object", "not": {"$ref": "#/$defs/d0"}, "$defs": doubled}
    check = check_of(Structured("json_schema", json.dumps(schema)), None)
    assert check is not None
    said = "the whole: it cannot be checked: too costly: more than 0.25 s of computing"
    assert check("{}", True) == check("[]", True) == [said]


TOOLS = {
    "read": _object(path={"type": "string", "format": "path"}),
    "write": _object(inner=_object(**{"a/b": {"type": "string", "minLength": 5, "maxLength": 2}})),
}


def test_a_refusal_names_the_part():
    compiler, schema = Compiler(TOKENIZER), TOOLS["write"]
    for tools in ({"": schema}, {"": None, "read": TOOLS["read"], "write": schema}):
        shape = Structured("json_schema", json.dumps(schema))
        message = refused(ConfigError("start: grammar"), "p", shape, tools, compiler.matcher).message
        where = "tool 'write' at " * ("write" in tools) + "/properties/inner/properties/a~1b"
        assert message.startswith(f"Invalid 'p': {where}: Unsatisfiable schema")


def test_a_tool_that_nothing_satisfies():
    compiler, tools = Compiler(TOKENIZER), {"read": TOOLS["read"], "none": {"type": "object", "not": {}}}
    error = refused(ConfigError("start: grammar"), "tools", Structured("grammar", "x"), tools, compiler.matcher)
    assert error.message == "Invalid 'tools': tool 'none': no text conforms to it"


@pytest.mark.parametrize("text", ["{bad", "null", "[1]", '{"items":' * 300 + "{}" + "}" * 300, '{"$ref": "#"}'])
def test_what_is_no_schema_is_refused_in_a_line(text):
    shape = Structured("json_schema", text)
    compiler = Compiler(TOKENIZER)
    with pytest.raises(ConfigError) as caught:
        compiler.matcher(shape)
    message = refused(caught.value, "p", shape, {"": schema_of(shape)}, compiler.matcher).message
    assert len(message) < 300
    assert "\n" not in message


def test_many_tools_that_are_fine_alone_are_too_many_together():
    shape = Structured("grammar", "start: x")
    error = refused(ConfigError("start: grammar"), "tools", shape, {"read": TOOLS["read"]}, lambda shape: None)
    assert error.message == "Invalid 'tools': the schemas of 1 tools are too large for one grammar; send fewer."


def test_a_servers_refusal_names_the_tool_and_the_field():
    tools: Any = [{"type": "function", "function": {"name": name, "parameters": each}} for name, each in TOOLS.items()]
    with fake_server(grammars=Compiler(TOKENIZER)) as live, connected(live) as client:
        for schema, where in ((None, "tool 'write' at "), (TOOLS["write"], "")):
            asked: Any = (
                {"tools": tools, "tool_choice": "required"} if schema is None else {"response_format": _format(schema)}
            )
            with pytest.raises(openai.BadRequestError) as caught:
                client.chat.completions.create(model="fake", messages=HELLO, max_tokens=5, **asked)
            assert caught.value.param == ("tools" if schema is None else "response_format")
            assert f"{where}/properties/inner/properties/a~1b: Unsatisfiable schema" in caught.value.message
            assert "start:" not in caught.value.message
        ok: Any = client.chat.completions.create(
            model="fake", messages=HELLO, tools=tools[:1], tool_choice="required", max_tokens=5
        )
        assert ok.usage.completion_tokens == 5


CALLED = 'so <tool_call>{"name": "look", "arguments": {"code": 1}}</tool_call>' + (
    f'<tool_call>{{"name": "tag", "arguments": {BAD}}}</tool_call>'
)


def _tools(strict: bool | None = None) -> list[dict[str, Any]]:
    both = (("tag", UNIQUE), ("look", LOOKING))
    return [
        {"type": "function", "function": {"name": name, "parameters": each, "strict": strict}} for name, each in both
    ]


def test_arguments_of_free_calls_are_checked(says):
    said = ['/code: 1 is not of type "string"', "/tags: [7,7] has non-unique elements"]
    with says(CALLED) as live:
        for limit in (None, len(CALLED)):  # the calls are whole, though the text was cut off
            for choice in _asked(live, tools=_tools(), max_tokens=limit):
                found = choice.model_extra["schema_errors"]
                assert found == [f"tool_calls.{i}.function.arguments{each}" for i, each in enumerate(said)]
        for choice in _asked(live, tools=_tools(), tool_choice="none"):
            assert "schema_errors" not in choice.model_extra
        assert live.engine.params[-1].structured_outputs is None
    with says(CALLED.replace(BAD, GOOD).replace('"code": 1', '"code": "1"')) as live:
        for choice in _asked(live, tools=_tools()):
            assert "schema_errors" not in choice.model_extra


def test_a_strict_tool_is_constrained_and_what_is_left_is_checked(says):
    with says(CALLED) as live:
        for choice in _asked(live, tools=_tools(strict=True)):
            assert choice.model_extra["schema_errors"][1].endswith("/tags: [7,7] has non-unique elements")
        assert live.engine.params[-1].structured_outputs.kind == "grammar"


def test_a_format_holds_of_texts_without_calls(says):
    for text, said in ((BAD, ["/tags: [7,7] has non-unique elements"]), (CALLED.removeprefix("so "), 2)):
        with says(text) as live:
            for choice in _asked(live, response_format=_format(UNIQUE), tools=_tools()):
                found = choice.model_extra["schema_errors"]
                assert found == said or len(found) == said
            assert live.engine.params[-1].structured_outputs.kind == "grammar"


def test_a_tool_whose_schema_is_none_is_refused(client):
    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "any"}}}}}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="fake", messages=HELLO, tools=tools)
    body: Any = caught.value.body
    assert "tool 'f': it is not a JSON schema" in body["message"]
    assert caught.value.param == "tools"
