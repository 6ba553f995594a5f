"""Clients that others wrote, against a server whose model says what a test wants: `pip install '.[serve,clients]'`."""

import asyncio
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import pydantic
import pytest

from tests.llm.engine.test_engine import continued, logprobs_of
from tests.llm.server.fake_engine import FakeEngine
from tests.llm.server.live import Live, fake_server
from tests.llm.server.real import make_engine, real_server

PROSE = "Let me see, in <tool_call> tags. "
CALL = PROSE + '<tool_call>{"name": "weather", "arguments": {"city": "Rome", "days": [1, 2]}}</tool_call>'
CITY = '{"name": "Zürich", "tags": ["a"]}'
DONE = "It is sunny 🌞 in Rome."
# Sockets and event loops that clients leave open.
pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}") for kind in (
    "ResourceWarning", "DeprecationWarning", "UserWarning", "pytest.PytestUnraisableExceptionWarning")]  # fmt: skip


class City(pydantic.BaseModel):
    """A city."""

    name: str
    tags: set[Literal["a", "b"]]


def says(prompt, params, index) -> bytes:
    """A call of the tool if it is shown and has not answered, JSON if that is asked for, else a sentence."""
    if params.structured_outputs is not None and params.structured_outputs.kind == "json_schema":
        return CITY.encode()
    text = bytes(token for token in prompt if token < 256).decode()
    return (CALL if "[tools" in text and "sunny, 20 degrees" not in text else DONE).encode()


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with fake_server(FakeEngine(script=says, max_length=2048, blocks=512)) as server:
        yield server


def weather(city: str, days: list[int]) -> str:
    """Get the weather of some days."""
    return f"sunny, 20 degrees in {city} on {days}"


def _last_prompt(live: Live) -> str:
    return bytes(token for token in live.engine.prompts[-1] if token < 256).decode()


def test_litellm(live, monkeypatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # nothing is fetched
    litellm = pytest.importorskip("litellm")
    asked: dict[str, Any] = {"model": "openai/fake", "api_base": f"{live.url}/v1", "api_key": "none"}
    parameters = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"items": {"type": "integer"}}}}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
    talk: list[Any] = [{"role": "user", "content": "How is Rome?"}]
    message = litellm.completion(messages=talk, tools=tools, **asked).choices[0].message
    (call,) = message.tool_calls
    result = {
        "role": "tool",
        "tool_call_id": call.id,
        "content": weather(**pydantic.TypeAdapter(dict).validate_json(call.function.arguments)),
    }
    answer = litellm.completion(messages=[*talk, message, result], tools=tools, **asked).choices[0].message
    assert (message.content, answer.content) == (PROSE, DONE)
    chunks = list(litellm.completion(messages=talk, stream=True, stream_options={"include_usage": True}, **asked))
    whole = litellm.stream_chunk_builder(chunks)
    assert (whole.choices[0].message.content, whole.usage.completion_tokens) == (DONE, len(DONE.encode()) + 1)
    text = litellm.completion(messages=talk, response_format=City, **asked).choices[0].message.content
    assert City.model_validate_json(text).name == "Zürich"


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_structured(live, method):
    chat = pytest.importorskip("langchain_openai").ChatOpenAI(model="fake", base_url=f"{live.url}/v1", api_key="none")
    assert chat.with_structured_output(City, method=method).invoke("Which city?") == City(name="Zürich", tags={"a"})


def test_langchain_tools(live):
    chat = pytest.importorskip("langchain_openai").ChatOpenAI(model="fake", base_url=f"{live.url}/v1", api_key="none")
    tool = pytest.importorskip("langchain_core.tools").tool
    human = pytest.importorskip("langchain_core.messages").HumanMessage
    asked, able = human("How is Rome?"), chat.bind_tools([tool(weather)])
    answer = able.invoke([asked])
    assert answer.tool_calls[0]["args"] == {"city": "Rome", "days": [1, 2]}
    results = [tool(weather).invoke(call) for call in answer.tool_calls]
    assert able.invoke([asked, answer, *results]).content == DONE
    assert "tool: sunny, 20 degrees in Rome on [1, 2]" in _last_prompt(live)
    assert "".join(chunk.content for chunk in chat.stream([asked])) == DONE


@pytest.mark.parametrize("model", ["OpenAIChatModel", "OpenAIResponsesModel"])
def test_pydantic_ai(live, model):
    ai = pytest.importorskip("pydantic_ai")
    models = pytest.importorskip("pydantic_ai.models.openai")
    providers = pytest.importorskip("pydantic_ai.providers.openai")

    async def talk() -> tuple[str, City]:
        async with httpx.AsyncClient() as http:
            provider = providers.OpenAIProvider(base_url=f"{live.url}/v1", api_key="none", http_client=http)
            made = getattr(models, model)("fake", provider=provider)
            said = await ai.Agent(made, tools=[weather]).run("How is Rome?")
            city = await ai.Agent(made, output_type=ai.NativeOutput(City)).run("Which?")
            return said.output, city.output

    assert asyncio.run(talk()) == (DONE, City(name="Zürich", tags={"a"}))
    assert any(
        "sunny, 20 degrees in Rome on [1, 2]" in bytes(t for t in p if t < 256).decode() for p in live.engine.prompts
    )


def test_litellm_responses(live, monkeypatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm = pytest.importorskip("litellm")
    asked: dict[str, Any] = {"model": "openai/fake", "api_base": f"{live.url}/v1", "api_key": "none"}
    whole = litellm.responses(input="How is Rome?", **asked)
    assert whole.output[0].content[0].text == DONE
    events = list(litellm.responses(input="How is Rome?", stream=True, **asked))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == DONE


def test_langchain_responses(live):
    made = pytest.importorskip("langchain_openai").ChatOpenAI
    tool = pytest.importorskip("langchain_core.tools").tool
    human = pytest.importorskip("langchain_core.messages").HumanMessage
    chat = made(model="fake", base_url=f"{live.url}/v1", api_key="none", use_responses_api=True)
    asked, able = human("How is Rome?"), chat.bind_tools([tool(weather)])
    answer = able.invoke([asked])
    assert answer.tool_calls[0]["args"] == {"city": "Rome", "days": [1, 2]}
    results = [tool(weather).invoke(call) for call in answer.tool_calls]
    assert able.invoke([asked, answer, *results]).text == DONE
    assert chat.with_structured_output(City, method="json_schema").invoke("Which?") == City(name="Zürich", tags={"a"})


def test_instructor(live):
    instructor, openai = pytest.importorskip("instructor"), pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        talk: list[Any] = [{"role": "user", "content": "Which city?"}]
        for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS):
            made = instructor.from_openai(client, mode=mode).chat.completions.create(
                model="fake", messages=talk, response_model=City, max_retries=0
            )
            assert made.model_dump() == {"name": "Zürich", "tags": {"a"}}  # of a class made from it


def test_llm(live, monkeypatch, tmp_path):
    """Simon Willison's command line, with a model of its configuration."""
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: local\n  model_name: fake\n  api_base: {live.url}/v1\n  api_key_name: none\n"
    )
    llm = pytest.importorskip("llm")
    response = llm.get_model("local").prompt("How is Rome?", key="none")
    assert response.text() == DONE


def test_lm_eval(compiled_soon, tiny_qwen3):
    """EleutherAI's harness: log-likelihoods of continuations by echoed prompts, and greedy answers, of a real model."""
    made = pytest.importorskip("lm_eval.models.openai_completions").LocalCompletionsAPI
    instance = pytest.importorskip("lm_eval.api.instance").Instance
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tiny_qwen3).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_qwen3)
    asked = [("The quick brown fox", " jumps"), ("What is the capital of", " France? The")]
    with real_server(*make_engine(tiny_qwen3)) as live:
        url = f"{live.url}/v1/completions"
        harness = made(base_url=url, model="tiny", tokenizer=str(tiny_qwen3), tokenizer_backend="huggingface")
        scored = harness.loglikelihood([instance("loglikelihood", {}, pair, i) for i, pair in enumerate(asked)])
        options = {"until": ["never said"], "max_gen_toks": 6}
        (said,) = harness.generate_until([instance("generate_until", {}, (asked[0][0], options), 0)])
    for (before, after), (found, greedy) in zip(asked, scored, strict=True):
        start, ids = len(tokenizer.encode(before)), tokenizer.encode(before + after)
        expected = logprobs_of(theirs, ids)
        assert found == pytest.approx(sum(expected[i - 1, ids[i]] for i in range(start, len(ids))), abs=5e-3)
        assert greedy == all(expected[i - 1].argmax() == ids[i] for i in range(start, len(ids)))
    tokens = continued(theirs, tokenizer.encode(asked[0][0]), 6)
    kept = tokens[: tokens.index(2)] if 2 in tokens else tokens
    assert said == tokenizer.decode(kept, skip_special_tokens=True)
