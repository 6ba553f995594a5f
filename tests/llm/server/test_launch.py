"""The server with the engine itself: a tiny random model, as the official client sees it."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pydantic
import pytest

from fullstride.llm.server.limits import ServerLimits
from fullstride.llm.server.schemas.chat import ChatRequest
from fullstride.llm.server.tools.answers import AnswerFormat
from fullstride.llm.server.tools.plan import ToolPlan
from fullstride.llm.server.tools.shapes import structured
from tests.llm.server.conftest import connected
from tests.llm.server.live import Live, until
from tests.llm.server.real import real_server

HELLO: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def real(tiny_engine) -> Iterator[Live]:
    """Served."""
    with real_server(*tiny_engine) as live:
        yield live


@pytest.fixture(scope="module")
def ask(real: Live) -> Iterator[openai.OpenAI]:
    """The official client."""
    with connected(real) as client:
        yield client


@pytest.fixture(scope="module")
def dense(real: Live) -> dict[str, int]:
    """Biases against whitespace, of which JSON allows more than a random model should have a chance to choose."""
    tokenizer = real.app.state.server.served.tokenizer
    return {str(i): -100 for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i).isspace()}


def test_a_stream_says_what_the_whole_says(ask):
    asked = {"model": "tiny", "prompt": ["The quick", "naïve 👩‍🚀"], "n": 2, "max_tokens": 30, "seed": 5, "logprobs": 3}
    whole = ask.completions.create(**asked)
    texts, tokens = [""] * 4, [[], [], [], []]
    for chunk in ask.completions.create(**asked, stream=True):
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        tokens[choice.index] += choice.logprobs.tokens if choice.logprobs else []
    assert texts == [choice.text for choice in whole.choices]
    assert tokens == [choice.logprobs.tokens for choice in whole.choices]
    assert len(set(texts)) == 4


def test_the_prompts_probabilities_are_those_of_generating_it(ask):
    greedy = ask.completions.create(model="tiny", prompt=[40, 41, 42], max_tokens=12, temperature=0, logprobs=2)
    text, generated = greedy.choices[0].text, greedy.choices[0].logprobs
    ids = httpx.post(
        f"{str(ask.base_url).removesuffix('/v1/')}/tokenize", json={"prompt": text, "add_special_tokens": False}
    ).json()["tokens"]
    asked = {"model": "tiny", "prompt": [40, 41, 42, *ids], "max_tokens": 0, "echo": True, "logprobs": 2}
    echoed = ask.completions.create(**asked).choices[0].logprobs
    assert echoed.token_logprobs[0] is None
    if len(ids) == len(generated.tokens):  # unless the text is split in another way
        assert echoed.token_logprobs[3:] == pytest.approx(generated.token_logprobs, abs=1e-4)
        assert echoed.tokens[3:] == generated.tokens


class Animal(pydantic.BaseModel):
    kind: str = pydantic.Field(pattern="^[a-z]{1,6}$")
    legs: bool


def test_json_that_the_client_can_parse(ask, dense):
    asked = {"model": "tiny", "messages": HELLO, "max_tokens": 40, "logit_bias": dense}
    done = ask.chat.completions.parse(**asked, response_format=Animal)
    assert isinstance(done.choices[0].message.parsed, Animal)


def test_shapes_of_text(ask):
    for shape, fits in (
        ({"regex": "(ab){2}c"}, lambda text: text == "ababc"),
        ({"structured_outputs": {"choice": ['ja "é"', "nein"]}}, lambda text: text in ('ja "é"', "nein")),
        ({"grammar": 'start: "x" | "y" start'}, lambda text: text.strip("y") == "x"),
    ):
        done = ask.chat.completions.create(model="tiny", messages=HELLO, max_tokens=30, extra_body=shape)
        if done.choices[0].finish_reason == "stop":
            assert fits(done.choices[0].message.content)


def test_tools_that_must_be_called(ask, dense):
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}, "required": ["a"]}
    schema |= {"additionalProperties": False, "$defs": {"A": {"enum": ["Rom", "東京"]}}}
    tools = [{"type": "function", "function": {"name": name, "parameters": schema}} for name in ("f", "g")]
    for choice in ("required", {"type": "function", "function": {"name": "g"}}):
        asked = {"model": "tiny", "messages": HELLO, "tools": tools, "tool_choice": choice}
        (call,) = ask.chat.completions.create(**asked, max_tokens=40, logit_bias=dense).choices[0].message.tool_calls
        assert call.function.name in ("f", "g")[choice != "required" :]
        assert json.loads(call.function.arguments)["a"] in ("Rom", "東京")
    with pytest.raises(openai.BadRequestError, match="template has no place for tools") as refused:
        ask.chat.completions.create(**asked | {"tool_choice": "auto"})
    assert refused.value.param == "tools"


def test_the_whitespace_of_a_forced_call_has_an_end(real):
    tools = [{"type": "function", "function": {"name": "f", "parameters": Animal.model_json_schema()}}]
    body = ChatRequest.model_validate({"messages": HELLO, "tools": tools, "tool_choice": "required"})
    matcher = real.engine.grammars.matcher(ToolPlan.of(body, ServerLimits(), AnswerFormat.of("auto", None)).forced)
    encode = real.engine.tokenizer.encode
    assert all(map(matcher.advance, encode('{"name": "f", "arguments": {')))
    assert sum(map(matcher.advance, encode(" ") * 100)) == 24


def test_what_the_server_makes_of_schemas_and_choices_has_rows_as_wide_as_a_schemas(real):
    properties = {f"property{i}": {"type": "integer"} for i in range(900)}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}]
    choices = [f"option {i}" for i in range(2500)]
    for asked, text in (
        ({"tools": tools, "tool_choice": "required"}, '{"name": "f", "arguments": {"property7": 1, "property899": 2}}'),
        ({"structured_outputs": {"choice": choices}}, "option 2499"),
    ):
        body = ChatRequest.model_validate({"messages": HELLO, **asked})
        shape = (
            ToolPlan.of(body, ServerLimits(), AnswerFormat.of("auto", None)).forced
            or structured(body, ServerLimits().schema_bytes)[1]
        )
        matcher = real.engine.grammars.matcher(shape)
        assert all(map(matcher.advance, real.engine.tokenizer.encode(text)))
        assert matcher.done


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
@pytest.mark.parametrize("parameters", [{"properties": {"x": {"type": "integer"}}}, {"type": ["object", "null"]}])
def test_arguments_are_an_object_whatever_their_schema_leaves_open(real, choice, parameters):
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    body = ChatRequest.model_validate({"messages": HELLO, "tools": tools, "tool_choice": choice})
    asked, encode = ToolPlan.of(body, ServerLimits(), AnswerFormat.of("auto", None)), real.engine.tokenizer.encode
    before = '{"name": "f", "arguments": ' if choice == "required" else ""
    for arguments, fine in (("{}", True), ("5", False), ("null", False), ("[1]", False)):
        matcher = real.engine.grammars.matcher(asked.forced)
        assert all(map(matcher.advance, encode(before + arguments))) is fine


@pytest.mark.parametrize(
    "shape",
    [{"regex": "("}, {"grammar": "start: nothing"}, {"structured_outputs": {"json": {"type": "nonsense"}}}],
)
def test_a_shape_that_is_not_understood(ask, shape):
    with pytest.raises(openai.BadRequestError, match="is not accepted|Invalid type: nonsense") as refused:
        ask.completions.create(model="tiny", prompt="x", extra_body=shape)
    assert refused.value.param == next(iter(shape))


def test_a_shape_that_proves_too_costly_on_the_way_is_a_bad_request(real, ask):
    # Its last row is too wide, which shows when the engine has come there.
    late = 'start: NAME "=" a\nNAME: /[a-m]{3}/\na: ' + " | ".join(['b "c"'] * 3000) + '\nb: "a" "b"'
    with pytest.raises(openai.BadRequestError, match="items; max is 2000") as refused:
        ask.completions.create(model="tiny", prompt="x", max_tokens=8, extra_body={"grammar": late})
    assert refused.value.code == "too_costly"
    assert ask.completions.create(model="tiny", prompt="x", extra_body={"regex": "abc"}).choices[0].text == "abc"
    until(lambda: real.engine.stats().free_blocks == real.engine.stats().blocks)


@pytest.mark.parametrize("asked", [{"prompt": "x" * 70}, {"prompt": "x", "max_tokens": 64}])
def test_what_can_never_fit(ask, asked):
    with pytest.raises(openai.BadRequestError) as refused:
        ask.completions.create(model="tiny", **asked)
    assert refused.value.code == "context_length_exceeded"


def test_a_client_that_goes_gives_its_blocks_back(real, ask):
    engine = real.engine
    before = engine.stats()
    with ask.completions.create(model="tiny", prompt="x", max_tokens=60, stream=True, n=4) as stream:
        next(iter(stream))
        assert engine.stats().free_blocks < before.free_blocks
    until(lambda: engine.stats().free_blocks == before.free_blocks)
    assert engine.stats().generated_tokens < before.generated_tokens + 4 * 60


def test_a_step_that_fails_ends_its_requests_and_no_others(real, ask, monkeypatch):
    from fullstride.llm.engine import engine as module

    def fail(*args: object) -> None:
        raise RuntimeError("told to fail")

    with monkeypatch.context() as broken:
        broken.setattr(module, "dispatch", fail)
        with pytest.raises(openai.InternalServerError, match="told to fail"):
            ask.completions.create(model="tiny", prompt="x")
    assert ask.completions.create(model="tiny", prompt="x").choices[0].finish_reason in ("stop", "length")
    assert real.bridge.healthy()
    until(lambda: real.engine.stats().free_blocks == real.engine.stats().blocks)


def test_the_queues_time_ends_when_the_engine_begins(real, ask):
    registry = real.app.state.server.metrics.registry

    def count(name: str) -> float:
        return registry.get_sample_value(f"fullstride_llm_{name}")

    waited, accepted = count("queue_seconds_count"), count("requests_accepted_total")
    ask.completions.create(model="tiny", prompt=["a", "b"], n=2, max_tokens=3)
    assert (count("queue_seconds_count"), count("requests_accepted_total")) == (waited + 1, accepted + 1)
    assert count("queue_seconds_sum") <= count("time_to_first_token_seconds_sum")
