"""Admission, deadlines, disconnects and failures, each through a live server."""

import contextlib
import json
import logging
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from tests.llm.server.conftest import connected
from tests.llm.server.fake_engine import FAIL_ADD, FAIL_REQUEST, FAIL_STEP, FakeEngine
from tests.llm.server.live import Live, fake_server, until

ENDLESS = {"model": "fake", "prompt": "abc", "max_tokens": 400, "ignore_eos": True}


def _slow(**settings) -> FakeEngine:
    return FakeEngine(delay=0.005, **settings)


def _count(live: Live, name: str, **labels: str) -> float:
    return live.app.state.server.metrics.registry.get_sample_value(f"fullstride_llm_{name}", labels) or 0.0


@contextlib.contextmanager
def _raw(live: Live, body: dict) -> Iterator[None]:
    """A request on a connection that is cut at the end."""
    content = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", int(live.url.rsplit(":", 1)[1]))) as connection:
        connection.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
        yield


def _stream(client: openai.OpenAI):
    """The endless request, by the official client."""
    asked = {key: value for key, value in ENDLESS.items() if key != "ignore_eos"}
    return client.completions.create(**asked, extra_body={"ignore_eos": True}, stream=True)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_frees_its_blocks_within_a_step(stream):
    engine = _slow()
    with fake_server(engine) as live:
        with _raw(live, {**ENDLESS, "stream": stream}):
            until(lambda: engine.running and engine.running[0].made > 2)
            assert engine.free < engine.blocks
        until(lambda: engine.aborted)
        steps = engine.steps
        until(lambda: engine.free == engine.blocks)
        assert engine.steps <= steps + 1
        until(lambda: _count(live, "requests_aborted_total", reason="disconnect") == 1)
        assert live.bridge._open == 0


def test_a_client_that_goes_before_its_first_token():
    engine = FakeEngine(delay=0.005, max_sequences=1)
    with fake_server(engine) as live, connected(live) as client, _stream(client) as first:
        next(iter(first))
        with _raw(live, {**ENDLESS, "stream": True}):
            until(lambda: engine.waiting)
        until(lambda: not engine.waiting)
        assert len(engine.running) == 1


def test_a_full_queue_answers_429_and_says_when_to_come_back():
    engine, body = _slow(max_sequences=2), {**ENDLESS, "max_tokens": 200}
    with fake_server(engine, queue=2) as live, ThreadPoolExecutor(4) as pool, httpx.Client(base_url=live.url) as http:
        accepted = [pool.submit(httpx.post, f"{live.url}/v1/completions", json=body) for _ in range(4)]
        until(lambda: live.bridge._open == 4)
        refused = http.post("/v1/completions", json=ENDLESS)
        assert refused.status_code == 429
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert http.get("/ready").status_code == 503
        assert http.get("/health").status_code == 200
        error = http.post("/v1/completions", json={**ENDLESS, "n": 5}).json()["error"]
        assert (error["code"], error["param"]) == ("too_many_completions", "n")
        assert [each.result().status_code for each in accepted] == [200] * 4
        assert http.get("/ready").status_code == 200
        assert _count(live, "requests_refused_total", reason="queue_full") == 1


def test_the_client_comes_back_by_itself():
    engine = _slow(max_sequences=1)
    with fake_server(engine, queue=0) as live, _raw(live, {**ENDLESS, "max_tokens": 100}):
        until(lambda: live.bridge._open == 1)
        with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=3) as client:
            assert client.completions.create(model="fake", prompt="back").choices[0].text == "back"
        assert _count(live, "requests_refused_total", reason="queue_full") >= 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_for_the_queue(stream):
    engine = _slow(max_sequences=1)
    with fake_server(engine, queue_seconds=0.2) as live, httpx.Client(base_url=live.url) as http:
        with _raw(live, ENDLESS):
            until(lambda: engine.running)
            answer = http.post("/v1/completions", json={**ENDLESS, "stream": stream})
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "queue_timeout")
            assert "retry-after" in answer.headers
            assert len(engine.running) == 1  # the first one had its token in time
        assert _count(live, "requests_aborted_total", reason="queue_timeout") == 1


def test_a_deadline_for_everything():
    engine = _slow()
    with fake_server(engine, total_seconds=0.3) as live, httpx.Client(base_url=live.url) as http:
        answer = http.post("/v1/completions", json=ENDLESS)
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
        assert answer.headers["x-should-retry"] == "false"
        with connected(live) as client, pytest.raises(openai.APIError, match=r"within 0\.3 s"):
            list(_stream(client))
        until(lambda: engine.free == engine.blocks)
        assert _count(live, "requests_aborted_total", reason="total_timeout") == 2


def test_what_can_never_fit_is_refused_in_the_engines_words():
    engine = FakeEngine(blocks=4)
    with fake_server(engine) as live, connected(live) as client:
        with pytest.raises(openai.BadRequestError, match="never fit") as refused:
            client.completions.create(model="fake", prompt=["abc", "x" * 70], max_tokens=20, stream=True)
        assert refused.value.code == "cannot_be_served"
        until(lambda: not engine.busy)
        assert (engine.free, live.bridge._open) == (4, 0)
        assert _count(live, "requests_ended_total", outcome="refused") == 1
        assert _count(live, "requests_refused_total", reason="cannot_be_served") == 1


@pytest.mark.parametrize("how", [FAIL_ADD, FAIL_REQUEST])
@pytest.mark.parametrize("stream", [False, True])
def test_an_error_of_one_request_is_its_own(how, stream):
    engine = _slow()
    with fake_server(engine) as live, connected(live) as client, ThreadPoolExecutor(1) as pool:
        other = pool.submit(client.completions.create, model="fake", prompt="x" * 40, max_tokens=40)
        until(lambda: engine.running)
        with pytest.raises(openai.APIError) as failed:
            list(client.completions.create(model="fake", prompt=[[97] * 9, [97, how]], stream=stream, max_tokens=50))
        assert failed.value.type == "server_error"
        assert other.result().choices[0].text == "x" * 40
        assert live.bridge.healthy()
        until(lambda: engine.free == engine.blocks)


def test_a_dead_engine_fails_everybody_once_and_turns_health_red():
    engine = _slow(max_sequences=3)
    with fake_server(engine) as live, httpx.Client(base_url=live.url) as http, ThreadPoolExecutor(6) as pool:
        with connected(live) as client, _stream(client) as streamed:
            asked = [pool.submit(httpx.post, f"{live.url}/v1/completions", json=ENDLESS) for _ in range(5)]
            until(lambda: live.bridge._open == 6)
            engine.running[0].prompt = [FAIL_STEP]
            with pytest.raises(openai.APIError, match="The engine failed") as failed:
                list(streamed)
        assert failed.value.code == "engine_error"
        assert [each.result().status_code for each in asked] == [500] * 5
        answer = http.get("/health")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_dead")
        assert _count(live, "requests_refused_total", reason="engine_dead") == 0
        assert http.get("/ready").status_code == 503
        assert http.post("/v1/completions", json=ENDLESS).status_code == 503
        assert _count(live, "requests_refused_total", reason="engine_dead") == 1
        assert live.bridge._open == 0
        assert _count(live, "engine_up") == 0
        assert _count(live, "requests_aborted_total", reason="engine_death") == 6


def test_an_engine_that_says_that_it_is_dead():
    class Dying(FakeEngine):
        def step(self):
            deltas = super().step()
            self.dead = "so it was told" if self.steps > 3 else None
            return deltas

    with fake_server(Dying(delay=0.005)) as live, httpx.Client(base_url=live.url) as http:
        assert http.post("/v1/completions", json=ENDLESS).status_code == 500
        assert http.get("/health").status_code == 503


def test_a_step_that_never_ends_turns_health_red():
    release = threading.Event()

    class Stuck(FakeEngine):
        def step(self):
            release.wait(10)
            return super().step()

    with fake_server(Stuck(), stall_seconds=0.1) as live, _raw(live, ENDLESS):
        until(lambda: httpx.get(f"{live.url}/health").status_code == 503)
        release.set()
        until(lambda: httpx.get(f"{live.url}/health").status_code == 200)


def test_slow_readers_hold_nobody_up():
    engine = FakeEngine(delay=0.001, blocks=200)
    with fake_server(engine) as live, connected(live) as client, contextlib.ExitStack() as lazy:
        for _ in range(3):
            lazy.enter_context(_raw(live, {**ENDLESS, "max_tokens": 500, "stream": True}))
        until(lambda: len(engine.running) == 3)
        assert client.completions.create(model="fake", prompt="quick").choices[0].text == "quick"
        lazy.close()
        until(lambda: engine.free == engine.blocks)


def test_stopping_ends_what_is_not_done_in_time_and_finishes_what_is():
    engine = _slow()
    with ThreadPoolExecutor(2) as pool:
        with fake_server(engine, drain_seconds=1.5) as live:
            short = pool.submit(httpx.post, f"{live.url}/v1/completions", json={**ENDLESS, "max_tokens": 30})
            body = {**ENDLESS, "max_tokens": 500}
            long = pool.submit(httpx.post, f"{live.url}/v1/completions", json=body, timeout=20)
            until(lambda: live.bridge._open == 2)
        assert short.result().status_code == 200
        assert (long.result().status_code, long.result().json()["error"]["code"]) == (503, "stopped")
    assert engine.free == engine.blocks


def test_a_time_to_drain_beyond_what_a_thread_can_wait_for_stops_without_an_error(caplog):
    with fake_server(drain_seconds=10 * threading.TIMEOUT_MAX) as live:
        assert httpx.post(f"{live.url}/v1/completions", json={"prompt": "abc"}).status_code == 200
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
