import logging
import re
from collections.abc import Iterator

import httpx
import openai
import pytest

from fullstride.errors import ConfigError
from fullstride.llm.server.launch import LOCAL_NAMES, names_of, serve
from tests.llm.server.conftest import connected
from tests.llm.server.live import Live, fake_server

KEYS = ("sk-first", "sk-zweiter-schlüssel")
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def guarded() -> Iterator[Live]:
    """A server with two keys."""
    with fake_server(api_keys=KEYS, body_bytes=1000) as live:
        yield live


def _routes(live: Live) -> list[tuple[str, str]]:
    paths = live.app.openapi()["paths"]
    found = [(method.upper(), path) for path, methods in paths.items() for method in methods]
    return [*found, ("GET", "/openapi.json"), ("GET", "/docs"), ("POST", "/no/such/path"), ("OPTIONS", "/v1/models")]


def test_every_route_but_those_of_probes_needs_a_key(guarded):
    routes = _routes(guarded)
    assert len(routes) > 9
    with httpx.Client(base_url=guarded.url) as http:
        for method, path in routes:
            answer = http.request(method, path, content=b"{}")
            if path in ("/health", "/ready"):
                assert answer.status_code == 200
                continue
            assert answer.status_code == 401, path
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.json()["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize(
    "header",
    [
        "",
        "Bearer",
        "Bearer sk-firs",
        "Bearer sk-first2",
        "Basic sk-first",
        "sk-first",
        "Bearer sk-first sk-first",
    ],
)
def test_what_is_no_key(guarded, header):
    assert httpx.get(f"{guarded.url}/v1/models", headers={"authorization": header}).status_code == 401


def _bearer(key: str) -> dict[bytes, bytes]:
    return {b"authorization": f"Bearer {key}".encode()}


def test_each_key_and_salt_has_cached_prompts_of_its_own(guarded, live):
    asked = {"model": "fake", "prompt": "x", "max_tokens": 1}
    for key in KEYS:
        for salt in ({}, {"cache_salt": "0:"}):
            answer = httpx.post(f"{guarded.url}/v1/completions", headers=_bearer(key), json={**asked, **salt})
            assert answer.status_code == 200
        answer = httpx.post(f"{guarded.url}/v1/embeddings", headers=_bearer(key), json={"input": "x"})
        assert answer.status_code == 200
    one, other, embedded = guarded.engine.salts[-6:-3], guarded.engine.salts[-3:-1], guarded.engine.salts[-1]
    assert len({*one, *other}) == 4
    assert (one[0], other[0]) == (one[2], embedded)
    for route, body in {"chat/completions": {"messages": HELLO}, "responses": {"input": "x"}}.items():
        assert httpx.post(f"{live.url}/v1/{route}", json=body).status_code == 200
        assert httpx.post(f"{live.url}/v1/{route}", json={**body, "cache_salt": "mine"}).status_code == 200
        assert live.engine.salts[-2:] == ["", ":mine"]
    assert httpx.post(f"{live.url}/v1/completions", json={**asked, "cache_salt": ""}).status_code == 400


def test_a_key_opens(guarded):
    for key in KEYS:
        header = b"Bearer " + key.encode()
        assert httpx.get(f"{guarded.url}/v1/models", headers={b"authorization": header}).status_code == 200
    with connected(guarded, "sk-first") as client:
        assert client.completions.create(model="fake", prompt="x").choices[0].text == "x"
    with connected(guarded, "sk-wrong") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_keys_are_compared_in_constant_time(guarded, monkeypatch):
    import hmac

    compared = []
    real = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append((a, b)) or real(a, b))
    httpx.get(f"{guarded.url}/v1/models", headers={"authorization": "Bearer sk-first"})
    assert [key for _, key in compared] == [key.encode() for key in KEYS]  # all of them, even after one fits


def test_without_a_key_a_body_is_not_even_measured(guarded):
    assert httpx.post(f"{guarded.url}/v1/completions", content=b"x" * 2000).status_code == 401


def test_a_request_has_an_id(live):
    for sent in (None, "mine-1", "a b", "x" * 129, "é"):
        headers = {} if sent is None else {b"x-request-id": sent.encode()}
        got = httpx.get(f"{live.url}/v1/models", headers=headers).headers["x-request-id"]
        assert got == sent if sent == "mine-1" else re.fullmatch(r"[0-9a-f]{32}", got)


def test_the_client_knows_the_id(client):
    assert client.completions.create(model="fake", prompt="x")._request_id


def test_the_log_has_every_request_and_no_contents(live, caplog):
    with caplog.at_level(logging.DEBUG), httpx.Client(base_url=live.url) as http:
        http.post("/v1/completions", json={"prompt": "my secret"}, headers={"x-request-id": "id-7"})
        http.post("/v1/completions", json={"prompt": "my secret", "n": "secret"})
        http.get("/v1/models/secret")
    # pytest turns uvicorn's own log of paths on, which DrainingServer turns off.
    ours = [record for record in caplog.records if record.name.startswith(("fullstride", "uvicorn.error"))]
    server = [record.getMessage() for record in ours]
    assert any(re.fullmatch(r"id-7 POST /v1/completions 200 \d+\.\d{3}s", line) for line in server)
    assert len([line for line in server if "/v1/" in line]) == 3
    assert not any("secret" in line for line in server)


def test_a_local_server_is_called_by_local_names():
    names = names_of("127.0.0.2", ())
    known = ("localhost:1", "127.0.0.1", "LOCALHOST", "[::1]:80", "127.0.0.2:8000")
    with fake_server(hosts=names) as live, httpx.Client(base_url=live.url) as http:
        assert {http.get("/v1/models", headers={"host": host}).status_code for host in known} == {200}
        for host in ("evil.example", "localhost.evil.example", "", "[::1", "localhost:1:2", "::1"):
            answer = http.get("/v1/models", headers={"host": host})
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unknown_host"), host
        refused = http.get("/metrics").text
    assert 'requests_refused_total{reason="unknown_host"} 6.0' in refused


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", None, ""])
def test_a_foreign_page_gets_nothing_done_by_what_browsers_send_unasked(kind):
    origin = {"origin": "http://evil.example", "sec-fetch-site": "cross-site"}
    body = b'{"messages": [{"role": "user", "content": "' + b"x" * 5000 + b'"}], "prompt": "x"}'
    with fake_server(hosts=LOCAL_NAMES) as live, httpx.Client(base_url=live.url, headers=origin) as http:
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            answer = http.post(path, content=body, headers={} if kind is None else {"content-type": kind})
            assert answer.status_code == 400
            # Only JSON is read, for which browsers ask first; and they are not told that they may.
            asked = {"access-control-request-method": "POST", "access-control-request-headers": "content-type"}
            may = http.options(path, headers=asked)
            assert may.status_code == 405
            assert not [name for name in (*answer.headers, *may.headers) if name.startswith("access-control")]
        assert not live.engine.prompts


@pytest.mark.parametrize(
    ("host", "keys", "names"),
    [("::1", (), (*LOCAL_NAMES, "::1")), ("127.0.0.1", ("k",), ("*",)), ("0.0.0.0", (), ("*",))],
)
def test_other_servers_are_called_by_any_name(host, keys, names):
    assert names_of(host, keys) == names


def test_names_that_end_alike():
    with fake_server(hosts=("*.example.com",)) as live, httpx.Client(base_url=live.url) as http:
        for host, status in (("a.example.com:80", 200), ("example.com", 400), ("a.example.com.evil", 400)):
            assert http.get("/v1/models", headers={"host": host}).status_code == status


@pytest.mark.parametrize("key", ["", " ", "a b", "k\n"])
def test_a_key_that_is_none_opens_no_server(key):
    with pytest.raises(ConfigError, match="API key 2 (is empty|has spaces): expected visible characters"):
        serve("no/such/model", api_keys=("k", key))
    with pytest.raises(ConfigError, match="API key 1"), fake_server(api_keys=(key,)):
        pass
