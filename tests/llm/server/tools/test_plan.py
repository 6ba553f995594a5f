import json
from typing import Any

import openai
import pytest

from fullstride.llm.server.tools.call_parser import CallParser
from fullstride.llm.server.tools.formats import FORMATS
from tests.llm.server.conftest import connected
from tests.llm.server.fake_engine import FakeEngine
from tests.llm.server.live import fake_server

HELLO: Any = [{"role": "user", "content": "hello"}]
PARAMETERS = {"type": "object", "properties": {"city": {"$ref": "#/$defs/City"}}, "$defs": {"City": {"type": "string"}}}


def _tool(name: str) -> dict:
    return {"type": "function", "function": {"name": name, "parameters": PARAMETERS, "description": "what it does"}}


TOOLS: Any = [_tool("weather"), _tool("time")]
WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
TIME = '<tool_call>[{"name": "time", "arguments": {"city": "東京"}}]</tool_call>'


def _prompt(live) -> str:
    return bytes(live.engine.prompts[-1]).decode()


def test_auto_shows_the_tools_and_none_hides_them(client, live):
    for choice, shown in ((None, True), ("auto", True), ("none", False)):
        asked = {"tool_choice": choice} if choice else {}
        client.chat.completions.create(model="fake", messages=HELLO, tools=TOOLS, **asked)
        assert _prompt(live).startswith("[tools weather,time]") is shown
        assert live.engine.params[-1].structured_outputs is None


@pytest.fixture
def says():
    """A client of a model that says this."""

    def make(text: str, seen: list | None = None):
        def script(prompt, params, index):
            if seen is not None:
                seen.append(params)
            return text.encode()

        return fake_server(FakeEngine(script=script))

    return make


def _asked(live, **asked: Any) -> tuple[Any, Any]:
    with connected(live) as client:
        whole = client.chat.completions.create(model="fake", messages=HELLO, tools=TOOLS, **asked).choices[0]
        with client.chat.completions.stream(model="fake", messages=HELLO, tools=TOOLS, **asked) as stream:
            for _ in stream:
                continue
            streamed = stream.get_final_completion().choices[0]
    return whole, streamed


@pytest.mark.parametrize(
    ("text", "content", "names"),
    [
        ("I look. " + WEATHER + "\n" + TIME, "I look. ", ["weather", "time"]),
        (TIME, None, ["time"]),
        (WEATHER.removesuffix("\n</tool_call>"), None, ["weather"]),
        ("a <tool_ca b < c", "a <tool_ca b < c", []),
        ("<tool_call>nonsense</tool_call> !", "<tool_call>nonsense</tool_call> !", []),
        ('<tool_call>{"name": "unknown"}</tool_call>', '<tool_call>{"name": "unknown"}</tool_call>', []),
        ("<tool_call>", "<tool_call>", []),
        ("a <tool_call>[]</tool_call>", "a <tool_call>[]</tool_call>", []),
    ],
)
def test_calls_are_read_out_of_the_text(says, text, content, names):
    with says(text) as live:
        both = _asked(live)
    for choice in both:
        calls = choice.message.tool_calls or []
        assert (choice.message.content or None) == content
        assert [call.function.name for call in calls] == names
        assert choice.finish_reason == ("tool_calls" if names else "stop")
        assert len({call.id for call in calls}) == len(names)
    for call, city in zip(
        both[0].message.tool_calls or [], ["Zürich", "東京"] if len(names) == 2 else [], strict=False
    ):
        assert json.loads(call.function.arguments) == {"city": city}


@pytest.mark.parametrize("arguments", ["[1]", "3", "false", '"hello"', '"[]"', '"{"', '{"x": NaN}', '{"x": 1e999}'])
def test_arguments_that_are_no_object_are_no_call(arguments):
    text = f'<tool_call>{{"name": "time", "arguments": {arguments}}}</tool_call>'
    assert CallParser(FORMATS["hermes"], {"time": True}).read(text, True) == [{"content": text}]


@pytest.mark.parametrize(
    ("arguments", "written"),
    [('"{\\"city\\": 1}"', '{"city": 1}'), ("null", "{}"), ('""', "{}"), ('{"city": "東京"}', '{"city": "東京"}')],
)
def test_arguments_are_written_as_an_object(arguments, written):
    (piece,) = CallParser(FORMATS["hermes"], {"time": True}).read(
        f'<tool_call>{{"name": "time", "arguments": {arguments}}}</tool_call>', True
    )
    assert piece["tool_calls"][0]["function"]["arguments"] == written


def test_half_a_surrogate_pair_in_a_call_is_replaced(says):
    with says(r'<tool_call>{"name": "time", "arguments": {"city": "\ud800 \ud83c\udf89"}}</tool_call>') as live:
        for choice in _asked(live):
            (call,) = choice.message.tool_calls
            assert json.loads(call.function.arguments) == {"city": "\ufffd 🎉"}


def test_one_call_where_no_more_are_wanted(says):
    with says(WEATHER + TIME) as live:
        for choice in _asked(live, parallel_tool_calls=False):
            assert [call.function.name for call in choice.message.tool_calls] == ["weather"]


def test_a_named_tool_is_forced(says):
    seen = []
    with says('{"city": "Köln"}', seen) as live:
        for choice in _asked(live, tool_choice={"type": "function", "function": {"name": "time"}}):
            (call,) = choice.message.tool_calls
            assert (call.function.name, json.loads(call.function.arguments)) == ("time", {"city": "Köln"})
            assert (choice.message.content or None, choice.finish_reason) == (None, "stop")
    assert json.loads(seen[0].structured_outputs.value) == PARAMETERS


def test_a_required_call_has_the_shape_of_one_of_them(says):
    seen = []
    with says('{"name": "time", "arguments": {"city": "Köln"}}', seen) as live:
        for choice in _asked(live, tool_choice="required"):
            (call,) = choice.message.tool_calls
            assert (call.function.name, json.loads(call.function.arguments)) == ("time", {"city": "Köln"})
            assert (choice.message.content or None, choice.finish_reason) == (None, "tool_calls")
    assert seen[0].structured_outputs.kind == "grammar"
    assert "weather" in seen[0].structured_outputs.value


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_some_tools_are_allowed_and_all_are_shown(says, mode):
    allowed = [{"type": "function", "function": {"name": "time"}}]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": allowed}}
    call = '{"name": "weather", "arguments": {}}' if mode == "required" else WEATHER
    with says(call) as live, connected(live) as client:
        asked: Any = {"model": "fake", "messages": HELLO, "tools": TOOLS, "tool_choice": choice}
        (answer,) = client.chat.completions.create(**asked).choices
        assert (answer.message.content, answer.message.tool_calls) == (call, None)
        assert _prompt(live).startswith("[tools weather,time]")
        shape = live.engine.params[-1].structured_outputs
        assert shape is None if mode == "auto" else ("time" in shape.value and "weather" not in shape.value)
        allowed[0]["function"] = {"name": "other"}
        with pytest.raises(openai.BadRequestError, match="Tool 'other' is not in 'tools'"):
            client.chat.completions.create(**asked)


def test_a_required_call_that_was_cut_off_is_content(says):
    with says('{"name": "time", "argum') as live:
        for choice in _asked(live, tool_choice="required"):
            assert (choice.message.content, choice.message.tool_calls) == ('{"name": "time", "argum', None)


def test_tools_have_names_of_their_own(client):
    with pytest.raises(openai.BadRequestError, match="Two of 'tools' have the name 'time'") as refused:
        client.chat.completions.create(model="fake", messages=HELLO, tools=[*TOOLS, _tool("time")])
    assert refused.value.param == "tools"


@pytest.mark.parametrize("begun", [False, True])
def test_a_call_drafted_in_thoughts_is_content(says, begun):
    thoughts = f"<think>{WEATHER}</think>\n\n"
    with says(thoughts.removeprefix("<think>" * begun) + TIME) as live:
        prompt: Any = [{"role": "user", "content": "hello"}]
        live.app.state.server.served.tokenizer.ending = "<think>\n" if begun else ""
        with connected(live) as client:
            done: Any = client.chat.completions.create(model="fake", messages=prompt, tools=TOOLS)
    (choice,) = done.choices
    assert choice.message.content == thoughts.removeprefix("<think>" * begun)
    assert [call.function.name for call in choice.message.tool_calls or []] == ["time"]
