import json
from typing import Any

import openai
import pydantic
import pytest

from tests.llm.server.conftest import connected
from tests.llm.server.fake_engine import FakeEngine
from tests.llm.server.live import fake_server

HELLO: Any = [{"role": "user", "content": "hello 👋"}]


def _prompt(live) -> str:
    return bytes(token for token in live.engine.prompts[-1] if token < 256).decode()


def test_an_answer(client, live):
    done = client.chat.completions.create(model="fake", messages=HELLO)
    (choice,) = done.choices
    assert _prompt(live) == "user: hello 👋\nassistant: "
    assert (choice.message.role, choice.message.content) == ("assistant", _prompt(live))
    assert (choice.finish_reason, choice.message.tool_calls, choice.logprobs) == ("stop", None, None)
    assert live.engine.params[-1].max_tokens is None
    assert live.engine.prompts[-1] == list(_prompt(live).encode())  # the template alone puts marks
    assert done.usage.completion_tokens == len(_prompt(live).encode()) + 1


def test_a_stream(client, live):
    options = {"include_usage": True}
    *chunks, last = client.chat.completions.create(
        model="fake", messages=HELLO, n=2, stream=True, stream_options=options
    )
    for index in range(2):
        mine = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert (mine[0].delta.role, mine[0].delta.content) == ("assistant", "")
        assert all(each.delta.role is None and each.finish_reason is None for each in mine[1:-1])
        assert "".join(each.delta.content or "" for each in mine) == _prompt(live)
        assert mine[-1].finish_reason == "stop"
    assert last.usage.completion_tokens == 2 * (len(_prompt(live).encode()) + 1)
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}


def test_the_client_puts_a_stream_together(client, live):
    with client.chat.completions.stream(model="fake", messages=HELLO, logprobs=True) as stream:
        for _ in stream:
            continue
        done = stream.get_final_completion()
    assert done.choices[0].message.content == _prompt(live)
    assert len(done.choices[0].logprobs.content) == len(_prompt(live).encode()) + 1


async def _answer(live) -> tuple[str, str]:
    async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none") as client:
        whole = await client.chat.completions.create(model="fake", messages=HELLO)
        stream = await client.chat.completions.create(model="fake", messages=HELLO, stream=True)
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
    return whole.choices[0].message.content or "", "".join(pieces)


def test_the_asynchronous_client(live):
    import asyncio

    whole, streamed = asyncio.run(_answer(live))
    assert whole == streamed == "user: hello 👋\nassistant: "


def test_logprobs_have_the_tokens_bytes(client):
    done = client.chat.completions.create(
        model="fake",
        messages=[{"role": "user", "content": "é"}],
        logprobs=True,
        top_logprobs=2,
        max_completion_tokens=8,
    )
    content = done.choices[0].logprobs.content
    assert bytes(byte for each in content for byte in each.bytes).decode() == "user: é"
    assert [each.logprob for each in content] == [-0.5] * 8
    assert [(top.token, top.logprob) for top in content[0].top_logprobs] == [("u", -0.5), ("v", -1.5)]


def test_no_logprob_is_lost_in_a_stream(client):
    chunks = list(client.chat.completions.create(model="fake", messages=HELLO, logprobs=True, stream=True))
    found = [each for chunk in chunks if chunk.choices[0].logprobs for each in chunk.choices[0].logprobs.content]
    assert bytes(byte for each in found for byte in each.bytes).decode() == "user: hello 👋\nassistant: <end>"


def test_every_role(client, live):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}], "name": "me"},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "audio": None},
        {"role": "tool", "tool_call_id": "1", "content": "3"},
        {"role": "system", "content": "end"},
    ]
    client.chat.completions.create(model="fake", messages=messages)
    assert _prompt(live) == "system: be brief\nuser: one\ntwo\nassistant: \ntool: 3\nsystem: end\nassistant: "


def test_every_event_may_have_the_counts(client):
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    chunks = client.chat.completions.create(model="fake", messages=HELLO, stream=True, stream_options=options)
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] > counts[0] > 0
    del options["include_usage"]
    with pytest.raises(openai.BadRequestError, match="continuous_usage_stats needs include_usage"):
        client.chat.completions.create(model="fake", messages=HELLO, stream=True, stream_options=options)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_no_tokens_may_be_asked_for(client, name):
    asked: dict[str, Any] = {name: 0, "logprobs": True, "n": 2}
    done = client.chat.completions.create(model="fake", messages=HELLO, **asked)
    found = [(choice.message.content, choice.finish_reason, choice.logprobs) for choice in done.choices]
    assert found == [("", "length", None)] * 2
    assert done.usage.completion_tokens == 0 < done.usage.prompt_tokens
    stream = client.chat.completions.create(
        model="fake", messages=HELLO, stream=True, stream_options={"include_usage": True}, **asked
    )
    *chunks, last = stream
    assert not any(choice.delta.content for chunk in chunks for choice in chunk.choices)
    assert last.usage == done.usage


def test_an_answer_can_be_sent_back(client, live):
    answer = client.chat.completions.create(model="fake", messages=HELLO).choices[0].message
    client.chat.completions.create(model="fake", messages=[*HELLO, answer, *HELLO])
    assert _prompt(live).count("hello") == 3


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # the client's, of its own messages
def test_a_parsed_answer_can_be_sent_back():
    text = '{"name": "Käfer", "legs": 6}'
    calls = f'<tool_call>{{"name": "Animal", "arguments": {text}}}</tool_call>'
    says = {"answer": text, "call": calls}
    engine = FakeEngine(script=lambda prompt, params, index: says[bytes(prompt).decode().split("#")[-2]].encode())
    with fake_server(engine) as live, connected(live) as client:
        ask: Any = [{"role": "user", "content": "#answer#"}]
        answer = client.chat.completions.parse(model="fake", messages=ask, response_format=Animal).choices[0].message
        assert answer.parsed == Animal(name="Käfer", legs=6)
        ask += [answer, {"role": "user", "content": "#call#"}]
        tools = [openai.pydantic_function_tool(Animal)]
        call = client.chat.completions.parse(model="fake", messages=ask, tools=tools).choices[0].message
        (called,) = call.tool_calls or []
        assert called.function.parsed_arguments == Animal(name="Käfer", legs=6)
        ask += [call, {"role": "tool", "tool_call_id": called.id, "content": "#answer#"}]
        assert client.chat.completions.create(model="fake", messages=ask).choices[0].message.content == text


def test_a_streamed_call_can_be_sent_back(client):
    call = {"index": 0, "id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    said: Any = {"role": "assistant", "content": "", "tool_calls": [call]}
    done = client.chat.completions.create(model="fake", messages=[*HELLO, said])
    assert done.choices[0].finish_reason == "stop"


def test_the_two_names_of_max_tokens(client, live):
    for name in ("max_tokens", "max_completion_tokens"):
        done = client.chat.completions.create(model="fake", messages=HELLO, **{name: 3})
        assert (done.choices[0].finish_reason, live.engine.params[-1].max_tokens) == ("length", 3)
    with pytest.raises(openai.BadRequestError, match="differ"):
        client.chat.completions.create(model="fake", messages=HELLO, max_tokens=3, max_completion_tokens=4)


def test_the_templates_arguments(client):
    with pytest.raises(openai.BadRequestError, match="so it was told"):
        client.chat.completions.create(
            model="fake", messages=HELLO, extra_body={"chat_template_kwargs": {"refuse": True}}
        )


class Animal(pydantic.BaseModel):
    name: str
    legs: int


def test_json_of_a_schema_is_parsed_by_the_client():
    text = '{"name": "Käfer", "legs": 6}'
    engine = FakeEngine(script=lambda prompt, params, index: text.encode())
    with fake_server(engine) as live, connected(live) as client:
        done = client.chat.completions.parse(model="fake", messages=HELLO, response_format=Animal)
    assert done.choices[0].message.parsed == Animal(name="Käfer", legs=6)
    shape = engine.params[0].structured_outputs
    assert shape is not None
    assert shape.kind == "json_schema"
    assert json.loads(shape.value)["properties"].keys() == {"name", "legs"}
