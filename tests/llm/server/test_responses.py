"""POST /v1/responses, by OpenAI's own client; the fake model says what a test wants."""

import json
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pydantic
import pytest

from fullstride.llm.server.responses.conversion import chat_of
from fullstride.llm.server.schemas.responses import ResponsesRequest
from fullstride.llm.server.tools.answers import AnswerFormat
from fullstride.llm.text.chat_template import ChatTemplate
from tests.llm.server.conftest import connected
from tests.llm.server.fake_engine import FAIL_REQUEST, FakeEngine
from tests.llm.server.live import fake_server
from tests.llm.server.real import real_server

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: Any = [{"type": "function", "name": name, "parameters": CITY, "strict": False} for name in ("weather", "time")]
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Zürich"}}</tool_call>'
TIME = CALL.replace("weather", "time")
SAYS = {
    "plain": "Hello é 👋",
    "thinks": f"<think>\nmaybe {CALL}\n</think>\n\nSo. ",
    "calls": f"<think>hm</think>I look. {CALL}\n{TIME}",
    "json": '{"city": "Köln"}',
    "ends": "",
}


class City(pydantic.BaseModel):
    city: str


def _says(prompt, params, index) -> bytes:
    text = bytes(token for token in prompt if token < 256).decode()
    return next(said for word, said in SAYS.items() if f"#{word}" in text).encode()


@pytest.fixture(scope="module")
def server():
    with fake_server(FakeEngine(script=_says, max_length=1024, blocks=256)) as live:
        live.app.state.server.served.answers = AnswerFormat.of("auto", ChatTemplate("{{ '</think>' }}", {}))
        yield live


@pytest.fixture(scope="module")
def ask(server):
    with connected(server) as client:
        yield client.responses


def _items(response) -> list[tuple]:
    """What the items say, in order."""
    found = []
    for item in response.output:
        if item.type == "function_call":
            found.append((item.name, json.loads(item.arguments)))
        else:
            found.append((item.type, "".join(part.text for part in item.content)))
    return found


@pytest.mark.parametrize(
    ("word", "tools", "items"),
    [
        ("plain", None, [("message", SAYS["plain"])]),
        ("thinks", TOOLS, [("reasoning", f"\nmaybe {CALL}\n"), ("message", "\n\nSo. ")]),
        (
            "calls",
            TOOLS,
            [
                ("reasoning", "hm"),
                ("message", "I look. "),
                ("weather", {"city": "Zürich"}),
                ("time", {"city": "Zürich"}),
            ],
        ),
        ("ends", None, [("message", "")]),
    ],
)
def test_a_stream_has_the_items_of_a_response(ask, word, tools, items):
    asked: dict[str, Any] = {"model": "fake", "input": f"#{word}", **({"tools": tools} if tools else {})}
    whole = ask.create(**asked, metadata={"a": "b"}, instructions="be brief", store=False)
    assert (_items(whole), whole.status, whole.metadata, whole.instructions) == (
        items,
        "completed",
        {"a": "b"},
        "be brief",
    )
    assert whole.output_text == "".join(text for kind, text in items if kind == "message")
    with ask.stream(**asked) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert _items(final) == items
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (events[0].type, events[1].type, events[-1].type) == (
        "response.created",
        "response.in_progress",
        "response.completed",
    )
    assert final.usage.output_tokens == len(SAYS[word].encode()) + 1 == whole.usage.output_tokens
    thought = sum(len(str(text).encode()) for kind, text in items if kind == "reasoning")
    reasoned = final.usage.output_tokens_details.reasoning_tokens
    assert thought <= reasoned <= thought + len("</think>") or reasoned == thought == 0
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.id for item in done] == [item.id for item in final.output]
    assert _items(SimpleNamespace(output=done)) == items
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert deltas == final.output_text


def test_items_are_sent_back(ask, server):
    first = ask.create(model="fake", input="#calls", tools=TOOLS)
    results = [
        {
            "type": "function_call_output",
            "call_id": item.call_id,
            "output": "sunny" if item.name == "weather" else "noon",
        }
        for item in first.output
        if item.type == "function_call"
    ]
    given: Any = [{"role": "user", "content": "go"}, *first.output, *results, {"role": "user", "content": "#plain"}]
    ask.create(model="fake", input=given, tools=TOOLS, instructions="be brief")
    prompt = bytes(server.engine.prompts[-1]).decode()
    assert prompt == (
        "[tools weather,time]\nsystem: be brief\nuser: go\nassistant: I look. \ntool: sunny\ntool: noon\n"
        "user: #plain\nassistant: "
    )
    messages = chat_of(
        ResponsesRequest.model_validate({"input": json.loads(json.dumps([item.to_dict() for item in first.output]))})
    )
    (message,) = messages.messages
    said: Any = message
    assert (said.reasoning_content, said.content) == ("hm", "I look. ")
    assert [call.function.name for call in said.tool_calls] == ["weather", "time"]


def test_what_the_model_said_is_one_message_as_long_as_its_parts_are_in_order():
    texts = [{"type": "reasoning", "id": "1", "summary": [{"type": "summary_text", "text": "r"}]}]
    texts += [{"role": "assistant", "content": [{"type": "output_text", "text": text}]} for text in ("a", "b")]
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    body = ResponsesRequest.model_validate({"input": [*texts, call, texts[0], {"role": "user", "content": "q"}, call]})
    found: list[Any] = [message.model_dump(exclude_none=True) for message in chat_of(body).messages]
    assert [(each["role"], sorted(each.keys() - {"role"})) for each in found] == [
        ("assistant", ["content", "reasoning_content"]),
        ("assistant", ["content", "tool_calls"]),
        ("assistant", ["reasoning_content"]),
        ("user", ["content"]),
        ("assistant", ["tool_calls"]),
    ]


# openai 3.3's own, of what it has parsed.
@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
def test_json_of_a_schema_is_parsed(ask, server):
    parsed = ask.parse(model="fake", input="#json", text_format=City)
    assert parsed.output_parsed == City(city="Köln")
    assert server.engine.params[-1].structured_outputs.kind == "json_schema"
    with ask.stream(model="fake", input="#json", text_format=City) as stream:
        assert stream.get_final_response().output_parsed == City(city="Köln")
    again: Any = [*parsed.output, {"role": "user", "content": "#plain"}]
    assert ask.create(model="fake", input=again).output_text == SAYS["plain"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_a_call_is_forced(ask, server, choice):
    body = ResponsesRequest.model_validate({"input": "#json", "tools": TOOLS, "tool_choice": choice})
    assert chat_of(body).tool_choice is not None
    forced = ask.create(model="fake", input="#json", tools=TOOLS, tool_choice=choice)
    assert server.engine.params[-1].structured_outputs is not None
    assert forced.output[0].type == ("message" if choice == "required" else "function_call")
    allowed: Any = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "time"}]}
    some = ask.create(model="fake", input="#calls", tools=TOOLS, tool_choice=allowed)
    assert [item.name for item in some.output if item.type == "function_call"] == ["time"]


def test_a_response_that_was_cut_off_is_incomplete(ask):
    cut = ask.create(model="fake", input="#plain", max_output_tokens=3)
    assert (cut.status, cut.incomplete_details.reason, cut.output_text) == ("incomplete", "max_output_tokens", "Hel")
    assert cut.output[0].status == "incomplete"
    events = list(ask.create(model="fake", input="#plain", max_output_tokens=3, stream=True))
    assert events[-1].type == "response.incomplete"


def test_logprobs_of_the_text(ask):
    asked: Any = {"model": "fake", "input": "#thinks", "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    (_, message) = ask.create(**asked).output
    found = message.content[0].logprobs
    assert bytes(byte for each in found for byte in each.bytes) == b"\n\nSo. <end>"
    assert all(len(each.top_logprobs) == 2 for each in found)
    with pytest.raises(openai.BadRequestError, match="needs 'message.output_text.logprobs'"):
        ask.create(model="fake", input="x", top_logprobs=2)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"store": True}, "'store': nothing is stored"),
        ({"previous_response_id": "resp_1"}, "'previous_response_id': nothing is stored"),
        ({"conversation": "conv_1"}, "'conversation': nothing is stored"),
        ({"background": True}, "'background': responses are made at once"),
        ({"truncation": "auto"}, "'truncation'"),
        ({"max_tool_calls": 2}, "'max_tool_calls'"),
        ({"tools": [{"type": "web_search"}]}, "tools.0"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0': expected an item of type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "text parts only"),
        ({"input": [{"role": "user"}]}, "input.0.content"),
        ({"include": ["file_search_call.results"]}, "include.0"),
        ({"reasoning": {"effort": "low"}}, "'reasoning.effort'"),
        ({"input": "x" * 2000}, "'input' and the completion"),
        (
            {"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "[]"}]},
            "'input': expected a JSON object",
        ),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"input": []}, "'input'"),
        ({"nonsense": 1}, "Unknown parameter: 'nonsense'"),
    ],
)
def test_what_is_not_served_is_refused_by_name(ask, asked, message):
    extra = {key: asked.pop(key) for key in ("nonsense",) if key in asked}
    with pytest.raises(openai.BadRequestError) as refused:
        ask.create(model="fake", **{"input": "x", **asked}, extra_body=extra)
    assert message in refused.value.message


def test_a_stream_that_fails_ends_in_an_error():
    calls = iter([b"abc", b"abc"])

    def script(prompt, params, index):
        return next(calls)

    with fake_server(FakeEngine(script=script, delay=0.05)) as live, connected(live) as client:
        served = live.app.state.server.served
        stream = client.responses.create(model="fake", input="x", stream=True)
        events = iter(stream)
        assert next(events).type == "response.created"
        live.engine.running[0].prompt = [FAIL_REQUEST]
        with pytest.raises(openai.APIError, match="could not continue"):
            list(events)
        assert served.names[0] == "fake"
        with httpx.stream("POST", f"{live.url}/v1/responses", json={"input": "x", "stream": True}) as raw:
            lines = [line for line in raw.iter_lines() if line]
    assert lines[0] == "event: response.created"
    assert all(line.startswith(("event: response.", "data: {")) for line in lines)


def test_the_model_itself_responds(tiny_engine):
    with real_server(*tiny_engine) as live, connected(live) as client:
        asked: Any = {"model": "tiny", "input": "The quick", "temperature": 0, "max_output_tokens": 7}
        whole = client.responses.create(**asked)
        chat = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "The quick"}], temperature=0, max_tokens=7
        )
        assert whole.output_text == chat.choices[0].message.content
        events = list(client.responses.create(**asked, stream=True))
        assert (
            "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
        )
        flag: Any = {"format": {"type": "json_schema", "name": "flag", "schema": {"enum": [True, False]}}}
        assert json.loads(client.responses.create(**asked, text=flag).output_text) in (True, False)
        flag["format"]["schema"] = {"type": "nonsense"}
        with pytest.raises(openai.BadRequestError, match=r"'text\.format'") as refused:
            client.responses.create(**asked, text=flag)
        assert refused.value.param == "text.format"
