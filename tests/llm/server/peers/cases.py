"""Requests of vLLM's and llama.cpp's own tests of their servers, and what is expected of the answers.

Each group is one of their files, each case one of its tests, or one of its parameters. A case expects something of the
answer; or that it is refused, as the peer refuses it; or, in words of the message, that it is refused here alone.
"""

import base64
from typing import Any, NamedTuple

import numpy as np

from tests.llm.server.peers.checks import (
    Check,
    begins_and_ends,
    choices,
    completed,
    echoes,
    is_paris,
    one_end,
    said,
    streams_logprobs,
    token_sums,
    tops,
    usages,
    vectors,
    whole_stream,
)


class Case(NamedTuple):
    """A request: its route, its body, and a check of what comes back, None for a refusal, or the words of ours."""

    name: str
    route: str
    body: dict[str, Any]
    expected: Check | str | None


ASK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is it?"}]
HI = {"role": "user", "content": "Hi"}
TALK = [HI, {"role": "assistant", "content": "Paris"}, HI]
LONG = [{"role": "user", "content": "What is the capital of France? " * 30}]
CONST = {"const": "Paris"}


def chat(name: str, expected: Check | str | None, **more: Any) -> Case:
    return Case(name, "chat/completions", {"messages": ASK, "max_tokens": 5, "temperature": 0, **more}, expected)


def text(name: str, expected: Check | str | None, **more: Any) -> Case:
    body = {"prompt": "The quick brown", "max_tokens": 5, "temperature": 0, **more}
    return Case(name, "completions", body, expected)


def respond(name: str, expected: Check | str | None, **more: Any) -> Case:
    return Case(name, "responses", {"input": "What is it?", "max_output_tokens": 5, **more}, expected)


def embed(name: str, expected: Check | str | None, **more: Any) -> Case:
    return Case(name, "embeddings", {"input": "What is it?", **more}, expected)


STREAM = {"stream": True}
VLLM_COMPLETION = [
    text("single", lambda a: a["usage"]["completion_tokens"] == 5 and a["choices"][0]["finish_reason"] == "length"),
    text("token ids", choices(1), prompt=[5, 5, 5]),
    text("truncated at the left", lambda a: a["choices"][0]["prompt_token_ids"] == [7, 8, 9], prompt=[5, 6, 7, 8, 9],
        truncate_prompt_tokens=3, return_token_ids=True),
    text("truncated at the right", "truncation_side", prompt=[5, 6, 7], truncate_prompt_tokens=2,
        truncation_side="right"),
    text("no logprobs", lambda a: a["choices"][0]["logprobs"] is None, logprobs=None),
    text("logprobs=0", lambda a: len(a["choices"][0]["logprobs"]["top_logprobs"][0]) == 1, logprobs=0),
    text("logprobs=5", lambda a: len(a["choices"][0]["logprobs"]["top_logprobs"][0]) in (5, 6), logprobs=5),
    text("logprobs=21", None, logprobs=21),
    text("logprobs=30, streamed", None, logprobs=30, **STREAM),
    text("prompt_logprobs=-1", None, prompt_logprobs=-1),
    text("prompt_logprobs=1", "send echo and logprobs", prompt_logprobs=1),
    text("streamed", one_end, **STREAM),
    text("n=3", choices(3), n=3, temperature=1, seed=42, logprobs=0),
    text("n=3, streamed", lambda a: {each["choices"][0]["index"] for each in a} == {0, 1, 2}, n=3, temperature=1,
        seed=42, **STREAM),
    text("usage not wanted", usages(False, False), stream_options={"include_usage": False}, **STREAM),
    text("usage always but not wanted", "needs include_usage", stream_options={"continuous_usage_stats": True},
        **STREAM),
    text("usage at the end", usages(False, True), stream_options={"include_usage": True}, **STREAM),
    text("usage always", usages(True, True), stream_options={"include_usage": True, "continuous_usage_stats": True},
        **STREAM),
    text("no options", usages(False, False), stream_options={}, **STREAM),
    text("options of no stream", None, stream_options={"include_usage": True}),
    text("null options of no stream", None, stream_options={"include_usage": None}),
    text("two prompts", choices(2), prompt=["The", "The"]),
    text("two lists", choices(2), prompt=[[5, 6], [5, 6]]),
    text("beam search", "ask for n completions", prompt=["The", "The"], n=2, use_beam_search=True),
    text("echo", echoes, echo=True, logprobs=1),
    text("echo of ids", lambda a: len(a["choices"][0]["logprobs"]["tokens"]) == 8, prompt=[5, 6, 7], echo=True,
        logprobs=0),
    text("no schema", None, structured_outputs={"json": {"type": "object", "properties": {"foo": "bar"}}}),
    text("no regex", None, structured_outputs={"regex": "[.*"}),
    text("no grammar", None, structured_outputs={"grammar": "root ::= select_statementinvalidsyntax"}),
    text("no prompt", None, prompt=None),
    text("no such token", None, prompt=[999999]),
]  # fmt: skip
VLLM_CHAT = [
    chat("no logprobs", lambda a: a["choices"][0]["logprobs"] is None, logprobs=False),
    chat("top_logprobs=0", tops(0), logprobs=True, top_logprobs=0),
    chat("top_logprobs=5", tops(5), logprobs=True, top_logprobs=5),
    chat("top_logprobs=21, streamed", None, logprobs=True, top_logprobs=21, **STREAM),
    chat("top_logprobs=30", None, logprobs=True, top_logprobs=30),
    chat("prompt_logprobs=0", lambda a: len(a["prompt_logprobs"]) == a["usage"]["prompt_tokens"], prompt_logprobs=0),
    chat("prompt_logprobs=2", lambda a: len(a["prompt_logprobs"][3]) in (2, 3), prompt_logprobs=2),
    chat("prompt_logprobs=-1", None, prompt_logprobs=-1),
    chat("without prompt_logprobs", lambda a: a.get("prompt_logprobs") is None),
    chat("session", lambda a: a["usage"]["total_tokens"] == a["usage"]["prompt_tokens"] + 5, messages=TALK),
    chat("adapter", lambda a: a["model"] == "wide", model="wide"),
    chat("streamed", one_end, **STREAM),
    chat("usage not wanted", usages(False, False), stream_options={"include_usage": False}, **STREAM),
    chat("usage at the end", usages(False, True), stream_options={"include_usage": True,
        "continuous_usage_stats": False}, **STREAM),
    chat("usage always", usages(True, True), min_tokens=5, stream_options={"include_usage": True,
        "continuous_usage_stats": True}, **STREAM),
    chat("null options of no stream", None, stream_options={"include_usage": None}),
    chat("options of no stream", None, stream_options={"include_usage": True}),
    chat("min_characters", "Unknown parameter: 'min_characters'", min_characters=10, **STREAM),
    chat("choice", lambda a: said(a) in ("Rust", "C"), structured_outputs={"choice": ["Rust", "C"]}, max_tokens=9,
        temperature=0.7),
    chat("choice and logprobs", tops(5), structured_outputs={"choice": ["Rust", "C"]}, max_tokens=9, logprobs=True,
        top_logprobs=5),
    chat("json", is_paris, structured_outputs={"json": CONST}, max_tokens=12),
    chat("regex", lambda a: said(a).count(".") == 1, structured_outputs={"regex": r"\d\.\d"}, max_tokens=9),
    chat("no regex", None, structured_outputs={"regex": {"1": "Python"}}),
    chat("json_schema", is_paris, response_format={"type": "json_schema", "json_schema": {"name": "x",
        "schema": CONST}}, max_tokens=12),
    chat("json_object", lambda a: said(a).lstrip().startswith("{"), response_format={"type": "json_object"}),
    chat("text", choices(1), response_format={"type": "text"}),
    chat("fields of messages", "Unknown parameter", messages=[{"role": "user", "content": "?", "extra_field": "0"}]),
    chat("parts", choices(1), messages=[{"role": "user", "content": [{"type": "text", "text": "What?"}]}]),
    chat("custom role", "role", messages=[{"role": "my-custom-role", "content": "?"}]),
    chat("short seed", None, seed=-(2**63) - 1),
    chat("long seed", None, seed=2**63),
    Case("invocations", "../invocations", {"messages": ASK}, "Unknown request URL"),
    chat("n=3", choices(3), n=3, temperature=0.7),
    chat("n=2, streamed", lambda a: {each["choices"][0]["index"] for each in a} == {0, 1}, n=2, temperature=0.7,
        **STREAM),
    chat("n=2 and seed", choices(2), n=2, seed=42, temperature=0.8),
]  # fmt: skip
VLLM_RESPONSES = [
    respond("basic", completed("message")),
    respond("instructions", completed("message"), instructions="Be brief."),
    respond("messages", completed("message"), input=TALK),
    respond("parts", completed("message"), input=[{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}]),
    respond("logprobs", lambda a: len(a["output"][-1]["content"][-1]["logprobs"][0]["top_logprobs"]) == 5,
        include=["message.output_text.logprobs"], top_logprobs=5),
    respond("streamed", whole_stream, **STREAM),
    respond("streamed logprobs", streams_logprobs, include=["message.output_text.logprobs"], top_logprobs=3, **STREAM),
    respond("reasoning sent back", completed("message"), input=[{"type": "message", "role": "user", "content": "Hi."},
        {"type": "reasoning", "id": "x", "summary": [], "content": [{"type": "reasoning_text",
        "text": "A greeting."}]}]),
    respond("history with ids", completed("message"), input=[HI, {"type": "message", "id": "msg_1",
        "status": "completed", "role": "assistant", "content": [{"type": "output_text", "text": "Yes."}]},
        {"type": "reasoning", "id": "rs_1", "status": "completed", "summary": [], "encrypted_content": None}, HI]),
    respond("history without ids", completed("message"), input=[HI, {"type": "message", "role": "assistant",
        "content": [{"type": "output_text", "text": "Yes."}]}, {"type": "reasoning", "summary": [],
        "encrypted_content": None}, HI]),
    respond("max_output_tokens",
        lambda a: a["status"] == "incomplete" and a["incomplete_details"]["reason"] == "max_output_tokens",
        ignore_eos=True),
    respond("sampling", completed("message"), temperature=0.7, top_p=0.9, top_k=40, repetition_penalty=1.2, seed=42),
    respond("response messages", "Unknown parameter", enable_response_messages=True),
    respond("no effort", "does not read it", reasoning={"effort": "none"}),
]  # fmt: skip
LLAMA_CHAT = [
    chat("whole", lambda a: a["choices"][0]["message"]["role"] == "assistant" and "cmpl" in a["id"]),
    chat("parts", choices(1), messages=[ASK[0], {"role": "user", "content": [{"type": "text", "text": "What is"},
        {"type": "text", "text": "it?"}]}]),
    chat("streamed", begins_and_ends, **STREAM),
    chat("seed", choices(1), seed=42, temperature=0.8),
    chat("prefill", choices(1), messages=[*ASK, {"role": "assistant", "content": "Whill"}],
        continue_final_message=True, add_generation_prompt=False),
    chat("prefill in parts", choices(1), messages=[*ASK, {"role": "assistant", "content": [{"type": "text",
        "text": "Whill"}]}], continue_final_message=True, add_generation_prompt=False),
    chat("json_object with a schema", "schema", response_format={"type": "json_object", "schema": CONST}),
    chat("json_schema", is_paris, response_format={"type": "json_schema", "json_schema": {"name": "x",
        "schema": CONST}}, max_tokens=12),
    chat("json_schema without a name", "json_schema.name", response_format={"type": "json_schema",
        "json_schema": {"schema": CONST}}, max_tokens=12),
    chat("json_object", lambda a: said(a).lstrip().startswith("{"), response_format={"type": "json_object"}),
    chat("sound", None, response_format={"type": "sound"}),
    chat("a number as schema", None, response_format={"type": "json_object", "schema": 123}),
    chat("a number as type", None, response_format={"type": "json_object", "schema": {"type": 123}}),
    chat("no such type", None, response_format={"type": "json_object", "schema": {"type": "hiccup"}}),
    chat("json_schema as a parameter", "json_schema", json_schema=CONST),
    chat("GBNF", "grammar", grammar='root ::= "a"{5,5}'),
    chat("no messages", None, messages=None),
    chat("a text", None, messages="string"),
    chat("a number", None, messages=[123]),
    chat("an empty message", None, messages=[{}]),
    chat("a role of 123", None, messages=[{"role": 123}]),
    chat("a content of 123", None, messages=[{"role": "system", "content": 123}]),
    chat("an empty message at the end", None, messages=[ASK[0], {}]),
    chat("timings", "timings_per_token", timings_per_token=True, **STREAM),
    chat("logprobs", token_sums, logprobs=True, top_logprobs=10),
    chat("logit_bias", lambda a: not set(a["choices"][0]["token_ids"]) & set(range(3, 250)), return_token_ids=True,
        logit_bias={str(i): -100 for i in range(3, 250)}),
    chat("too long", None, messages=LONG),
    chat("too long, streamed", None, messages=LONG, **STREAM),
    chat("progress", "return_progress", return_progress=True, **STREAM),
    chat("n=2", choices(2), n=2),
]  # fmt: skip
LLAMA_COMPLETION = [
    text("by openai", choices(1)),
    text("by openai, streamed", one_end, **STREAM),
    text("seed", choices(1), seed=42, temperature=1.0),
    text("too long", None, prompt="I believe the meaning of life is" * 32),
    text("ids", choices(1), prompt=[5, 6, 7]),
    text("lists of ids", lambda a: a["choices"][0]["text"] == a["choices"][1]["text"], prompt=[[5, 6, 7], [5, 6, 7]]),
    text("lists and texts", "prompt", prompt=[[5, 6, 7], "The"]),
    text("ids and texts in one", "prompt", prompt=[1, 2, "The", 3]),
]  # fmt: skip
LLAMA_EMBEDDING = [
    embed("single", vectors(1)),
    embed("multiple", vectors(4), input=["a", "b", "c", "d"]),
    embed("nothing", "input", input=""),
    embed("ids", vectors(1), input=[12, 34, 56]),
    embed("ids and a text in one", "input", input=[12, 34, "string"]),
    embed("lists", vectors(2), input=[[12, 34], [12, 34]]),
    embed("a text and a list", "input", input=["a", [12, 34]]),
    embed("an object", "input", input={"prompt_string": "string"}),
    embed("no input", None, input=[]),
    embed("a wrong object", None, input={"content": "string"}),
    embed("an image", None, input={"content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}),
    embed("mean", vectors(1), pooling="mean"),
    embed("mean of several", vectors(3), input=["a", "b", "c"], pooling="mean"),
    embed("no pooling", None, pooling="none"),
    embed("too long", None, input="This is a test " * 512),
    embed("the same", lambda a: len({tuple(each["embedding"]) for each in a["data"]}) == 1, input=["What?"] * 5),
    embed("usage", lambda a: a["usage"]["prompt_tokens"] == a["usage"]["total_tokens"] > 0, input=["a", "b"]),
    embed("base64", lambda a: len(np.frombuffer(base64.b64decode(a["data"][0]["embedding"]), np.float32)) == 48,
        encoding_format="base64"),
]  # fmt: skip
LLAMA_RESPONSES = [
    respond("json_schema", lambda a: a["output"][0]["content"][0]["text"] == '"Paris"',
        text={"format": {"type": "json_schema", "name": "x", "schema": CONST}}),
    respond("json_object", completed("message"), text={"format": {"type": "json_object"}}),
    respond("text", completed("message"), text={"format": {"type": "text"}}),
    respond("no schema", None, text={"format": {"type": "json_schema", "name": "x"}}),
    respond("by openai", lambda a: a["id"].startswith("resp_") and a["output"][0]["id"].startswith("msg_"), input=ASK,
        temperature=0.8),
    respond("by openai, streamed", whole_stream, input=ASK, temperature=0.8, **STREAM),
    respond("timings", "timings_per_token", timings_per_token=True, return_progress=True, **STREAM),
]  # fmt: skip
# By the peers' files, as the page of conformance names them.
GROUPS = {
    "vLLM `completion/test_completion.py`": VLLM_COMPLETION,
    "vLLM `chat_completion/test_chat.py`": VLLM_CHAT,
    "vLLM `responses/test_basic.py`, `test_simple.py`": VLLM_RESPONSES,
    "llama.cpp `test_chat_completion.py`": LLAMA_CHAT,
    "llama.cpp `test_completion.py`": LLAMA_COMPLETION,
    "llama.cpp `test_embedding.py`": LLAMA_EMBEDDING,
    "llama.cpp `test_compat_oai_responses.py`": LLAMA_RESPONSES,
}
