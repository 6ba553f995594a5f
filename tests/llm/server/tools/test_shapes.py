"""Shapes of hostile requests: what costs too much is a 400 that says why, and its work ends with its client."""

import asyncio
from collections.abc import Iterator

import httpx
import psutil
import pytest

from fullstride.llm.server.app import create_app
from fullstride.llm.server.limits import ServerLimits
from fullstride.llm.server.served_model import ServedModel
from fullstride.llm.text.grammar import Compiler
from tests.llm.server.fake_engine import FakeEngine
from tests.llm.server.fake_tokenizer import FakeTokenizer
from tests.llm.server.live import Live, listening, until
from tests.llm.text.test_grammar import TOKENIZER

COSTLY = {"type": "integer", "multipleOf": 9_999_991, "minimum": -(10**15), "maximum": 10**15}


@pytest.fixture(scope="module")
def real() -> Iterator[Live]:
    """A server whose shapes are compiled in earnest, and whose engine does not heed them."""
    engine, served = FakeEngine(), ServedModel(("fake",), FakeTokenizer(), 512)
    limits = ServerLimits(drain_seconds=1.0)
    with listening(create_app(engine, served, concurrent=8, limits=limits, grammars=Compiler(TOKENIZER))) as live:
        yield live


@pytest.fixture(scope="module")
def http(real: Live) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=real.url) as client:
        yield client


def _limited(real: Live, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Begin trials of shapes anew, with so much time for each."""
    confined = real.app.state.server.shapes._trial._tried
    monkeypatch.setattr(confined, "_seconds", seconds)
    confined._running = None


def _ask(http: httpx.Client, **body) -> httpx.Response:
    return http.post("/v1/completions", json={"prompt": "x", "max_tokens": 8, **body})


def _refused(answer: httpx.Response) -> dict[str, str]:
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


def test_a_costly_schema_is_refused_by_name_and_others_are_served_meanwhile(http, real, monkeypatch):
    made = []
    _limited(real, monkeypatch, 0.5)
    monkeypatch.setattr(real.app.state.server.shapes._grammars, "_compile", made.append)
    error = _refused(_ask(http, structured_outputs={"json": COSTLY}))
    assert error["param"] == "structured_outputs"
    assert "too costly: more than 0.5 s" in error["message"]
    assert "multipleOf = 9999991" in error["message"]
    assert not made


def test_the_work_for_a_client_that_has_gone_ends(http, real, monkeypatch):
    _limited(real, monkeypatch, 600.0)
    _ask(http, regex="[ab]c")
    process, _ = real.app.state.server.shapes._trial._tried._running
    body = {"prompt": "x", "structured_outputs": {"json": {**COSTLY, "multipleOf": 9_999_973}}}

    async def leave() -> None:
        async with httpx.AsyncClient(base_url=real.url) as client:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.post("/v1/completions", json=body), 0.4)

    asyncio.run(leave())
    until(lambda: not psutil.pid_exists(process.pid))
    assert _ask(http, regex="a(b|c)").status_code == 200


def test_alternatives_without_end_are_a_bad_request(http):
    error = _refused(_ask(http, grammar="start: " + " | ".join(f'"x{i}"' for i in range(6001))))
    assert error["param"] == "grammar"
    assert "6002 items; max is 2000" in error["message"]


def test_a_shape_is_tried_out_once(http, real, monkeypatch):
    tried = []
    bytes_of = real.app.state.server.shapes._trial.bytes_of
    trial = real.app.state.server.shapes._trial
    monkeypatch.setattr(trial, "bytes_of", lambda *asked: tried.append(asked[0]) or bytes_of(*asked))

    async def several() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=real.url) as client:
            body = {"prompt": "x", "max_tokens": 8, "regex": "seven[0-9]"}
            return await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(12)))

    assert {answer.status_code for answer in asyncio.run(several())} == {200}
    assert 1 <= len(tried) <= 2  # two at once, of which neither knew of the other
