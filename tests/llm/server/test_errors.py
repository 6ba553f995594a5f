import gzip
import json

import httpx
import openai
import pytest

from fullstride.llm.sampling_params import ParamError
from fullstride.llm.server.errors import refusing

CHAT = {"messages": [{"role": "user", "content": "hello"}]}


def _refused(http, path: str, body, status: int = 400, **settings) -> dict:
    answer = http.post(path, **(settings or {"json": body}))
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    assert "Value error" not in error["message"]  # pydantic's own words before ours
    return error


@pytest.mark.parametrize(
    ("asked", "param", "code"),
    [
        ({"n": 0}, "n", "invalid_type_or_value"),
        ({"n": 17}, "n", "above_limit"),
        ({"n": "2"}, "n", "invalid_type_or_value"),
        ({"n": True}, "n", "invalid_type_or_value"),
        ({"temperature": -1}, "temperature", "invalid_type_or_value"),
        ({"top_p": 0}, "top_p", "invalid_type_or_value"),
        ({"presence_penalty": 3}, "presence_penalty", "invalid_type_or_value"),
        ({"seed": 2**63}, "seed", "invalid_type_or_value"),
        ({"stop": ["a"] * 17}, "stop", "above_limit"),
        ({"stop": "a" * 257}, "stop", "above_limit"),
        ({"stop": ""}, "stop", "invalid_type_or_value"),
        ({"stop_token_ids": list(range(17))}, "stop_token_ids", "above_limit"),
        ({"stop_token_ids": [259]}, "stop_token_ids", "invalid_value"),
        ({"logit_bias": {str(i): 0 for i in range(301)}}, "logit_bias", "above_limit"),
        ({"logit_bias": {"259": 1}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1", "invalid_type_or_value"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", "invalid_value"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_type_or_value"),
        ({"temprature": 1}, "temprature", "unknown_parameter"),
        ({"Temperature[": 1}, "Temperature[", "unknown_parameter"),
        ({"x" * 1000: 1}, "x" * 64, "unknown_parameter"),
        ({"guided_json": {}}, "guided_json", "unsupported_parameter"),
        ({"model": "gpt-5"}, "model", "model_not_found"),
    ],
)
@pytest.mark.parametrize(("path", "body"), [("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", CHAT)])
def test_what_both_routes_refuse(http, path, body, asked, param, code):
    error = _refused(http, path, {**body, **asked}, 404 if code == "model_not_found" else 400)
    assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error")


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"prompt": "", "add_special_tokens": False}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt.0"),
        ({"prompt": [259]}, "prompt"),
        ({"prompt": [-1]}, "prompt.0"),
        ({"prompt": ["x", 1]}, "prompt.1"),
        ({"prompt": ["x"] * 129}, "prompt"),
        ({"prompt": ["x"] * 20, "n": 13}, "n"),
        ({"prompt": "x" * 1023}, "prompt"),
        ({"prompt": "x" * 20_000}, "prompt"),
        ({"max_tokens": 1023}, "prompt"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "end"}, "suffix"),
        ({"messages": []}, "messages"),
    ],
)
def test_what_completions_refuse(http, asked, param):
    assert _refused(http, "/v1/completions", {"prompt": "x", **asked})["param"] == param


def test_what_may_be_absent_is_null():
    error = refusing(ParamError("max_tokens", None, "1 or more, or None"), "max_tokens")
    assert error.message == "Invalid 'max_tokens': null; expected 1 or more, or null."
    assert error.param == "max_tokens"


IMAGE = {"type": "image_url", "image_url": {"url": "http://x"}}


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": ""}]}, "messages.0"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0"),
        ({"messages": [{"role": "user", "content": "x", "colour": 1}]}, "messages.0.colour"),
        ({"messages": [{"role": "user", "content": "x" * 2000}]}, "messages"),
        ({"messages": CHAT["messages"] * 2049}, "messages"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"store": True}, "store"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}] * 129}, "tools"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a": "x" * 2000}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"refuse": True}}, "messages"),
    ],
)
def test_what_chats_refuse(http, asked, param):
    assert _refused(http, "/v1/chat/completions", {**CHAT, **asked})["param"] == param


def test_a_tool_to_call_must_be_there(http):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    choice = {"type": "function", "function": {"name": "g"}}
    error = _refused(http, "/v1/chat/completions", {**CHAT, "tools": tools, "tool_choice": choice})
    assert error["param"] == "tool_choice"
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "[1]"}}
    error = _refused(http, "/v1/chat/completions", {"messages": [{"role": "assistant", "tool_calls": [call]}]})
    assert error["param"] == "messages.0.tool_calls.0.function.arguments"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"x"',
        b'{"prompt": NaN}',
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": 1e999}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "x", "\\udfff": 1}',
        b'{"prompt": "x", "user": "\xff"}',
        b'{"prompt": ' + b"[" * 40_000 + b"]" * 40_000 + b"}",
        b'{"prompt": "x", "logit_bias": {"a": ' + b'{"a": ' * 900 + b"1" + b"}" * 900 + b"}}",
        b'{"prompt": "x", "n": ' + b"9" * 5000 + b"}",
    ],
)
def test_bodies_that_are_none(http, content):
    _refused(http, "/v1/completions", None, content=content, headers={"content-type": "application/json"})


@pytest.mark.parametrize("value", [b"[" * 40_000 + b"]" * 40_000, b"9" * 5000, b'"\xff"'])
def test_json_that_python_cannot_read(http, live, value):
    count = live.app.state.server.metrics.refused.labels("invalid_json")
    before, content = count._value.get(), b'{"prompt": ' + value + b"}"
    error = _refused(http, "/v1/completions", None, content=content, headers={"content-type": "application/json"})
    assert (error["code"], "The body cannot be read: it is not UTF-8" in error["message"]) == ("invalid_json", True)
    assert count._value.get() == before + 1


@pytest.mark.parametrize("tools", [True, False])
def test_schemas_deeper_than_python_calls(http, tools):
    """JSON that Python could just read, and not write again some calls deeper."""
    for deep in (255, *range(940, 1000, 3)):
        schema = '{"a":' * deep + "1" + "}" * deep
        asked = f'"tools": [{{"type": "function", "function": {{"name": "f", "parameters": {schema}}}}}]'
        if not tools:
            asked = f'"response_format": {{"type": "json_schema", "json_schema": {{"name": "x", "schema": {schema}}}}}'
        content = f'{{"messages": [{{"role": "user", "content": "x"}}], {asked}}}'
        json_ = {"content-type": "application/json"}
        _refused(http, "/v1/chat/completions", None, content=content.encode(), headers=json_)


@pytest.mark.parametrize("headers", [{}, {"content-type": "text/plain"}])
def test_a_body_that_is_not_said_to_be_json(http, headers):
    error = _refused(http, "/v1/completions", None, content=b'{"prompt": "x"}', headers=headers)
    assert "send one, with the header 'content-type: application/json'" in error["message"]


def test_a_body_above_the_limit_with_and_without_its_length(http, live):
    prompts, count = len(live.engine.prompts), live.app.state.server.metrics.refused.labels("request_too_large")
    before = count._value.get()
    body = json.dumps({"prompt": "x" * 100_000}).encode()
    header = {"content-type": "application/json"}
    error = _refused(http, "/v1/completions", None, 413, content=body, headers=header)
    assert error["code"] == "request_too_large"
    pieces = (body[i : i + 1000] for i in range(0, len(body), 1000))
    assert _refused(http, "/v1/completions", None, 413, content=pieces, headers=header)["code"] == "request_too_large"
    assert len(live.engine.prompts) == prompts
    assert count._value.get() == before + 2


def test_a_compressed_body_is_refused_by_name_and_one_that_is_none_is_not(http):
    body, json_type = json.dumps({"model": "fake", "prompt": "x", "max_tokens": 1}).encode(), "application/json"
    for encoding, sent in (("gzip", gzip.compress(body)), ("gzip", body), ("br, gzip", b"")):
        headers = {"content-type": json_type, "content-encoding": encoding}
        error = _refused(http, "/v1/completions", None, 415, content=sent, headers=headers)
        assert (error["code"], encoding in error["message"]) == ("unsupported_encoding", True)
    for encoding in ("Identity", ""):
        headers = {"content-type": json_type, "content-encoding": encoding}
        assert http.post("/v1/completions", content=body, headers=headers).status_code == 200


def test_paths_and_methods_that_are_none(http):
    for method, path, status in (("GET", "/v1/audio/speech", 404), ("GET", "/v1/completions", 405)):
        answer = http.request(method, path)
        assert (answer.status_code, answer.json()["error"]["type"]) == (status, "invalid_request_error")
    assert http.get("/v1/completions").headers["allow"] == "POST"
    for method, path in (("GET", "/health/"), ("POST", "/v1/completions/")):
        answer = http.request(method, path, json={"prompt": "a"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_url")
    for path in ("/v1/models", "/v1/models/fake", "/health", "/ready", "/metrics"):
        assert {*http.delete(path).headers["allow"].split(", ")} == {"GET", "HEAD"}


def test_the_client_gets_its_own_errors(client):
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="fake", prompt="x", temperature=-1)
    with pytest.raises(openai.NotFoundError, match="gpt-5"):
        client.completions.create(model="gpt-5", prompt="x")


def test_no_value_of_a_request_is_repeated_by_its_validation(http):
    answer = http.post("/v1/completions", json={"prompt": "x", "n": "my secret", "stop": [["another secret"]]})
    assert "secret" not in answer.text


def test_an_error_that_nobody_expected_has_the_usual_shape(http, live, monkeypatch, caplog):
    def fail(*args: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(live.app.state.server.served.tokenizer, "encode", fail)
    with httpx.Client(base_url=live.url) as other:
        error = _refused(other, "/v1/completions", {"prompt": "x"}, 500)
    assert error["type"] == "server_error"
    assert "ZeroDivisionError" in caplog.text
