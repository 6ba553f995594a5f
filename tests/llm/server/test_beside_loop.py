"""Nothing whose time grows with a request runs in the event loop's thread: who does what is written down, not timed."""

import asyncio
import json
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from fullstride.llm.server import bodies, chat, completions, messages, routes
from fullstride.llm.server import context as server
from fullstride.llm.server.app import create_app
from fullstride.llm.server.errors import BadRequestError
from fullstride.llm.server.limits import ServerLimits
from fullstride.llm.server.schemas import base
from fullstride.llm.server.schemas.completion import CompletionRequest
from fullstride.llm.server.served_model import ServedModel
from fullstride.llm.server.tools import plan as tools
from tests.llm.server.fake_engine import FakeEngine
from tests.llm.server.fake_tokenizer import FakeTokenizer
from tests.llm.server.live import Live, listening

LONG = "naïve " * 2000
# Functions that look at all of a request, or write all of an answer.
WORK = [
    (base, "_check_texts"),
    (bodies, "_read"),
    (chat, "check_limits"),
    (chat, "structured"),
    (chat, "sampling_params"),
    (completions, "sampling_params"),
    (messages, "plain_messages"),
    (tools, "_check"),
    (server, "json_response"),
    (routes, "json_response"),
]


class Watched(FakeTokenizer):
    """Notes the threads of what is done to whole texts."""

    def __init__(self) -> None:
        self.threads: list[tuple[str, int]] = []

    def encode(self, text: str, special: bool = True) -> list[int]:
        self.threads.append(("encode", threading.get_ident()))
        return super().encode(text, special)

    def decode(self, ids: Any, skip_special: bool = True) -> str:
        self.threads.append(("decode", threading.get_ident()))
        return super().decode(ids, skip_special)

    def chat(self, *given: Any, **kwargs: Any) -> str:
        self.threads.append(("chat", threading.get_ident()))
        return super().chat(*given, **kwargs)


@pytest.fixture(scope="module")
def watched() -> Watched:
    return Watched()


@pytest.fixture(scope="module")
def live(watched: Watched) -> Iterator[Live]:
    engine = FakeEngine(blocks=4096, max_length=40_000)
    served, limits = ServedModel(("fake",), watched, engine.max_length), ServerLimits(drain_seconds=1.0)
    with listening(create_app(engine, served, concurrent=8, limits=limits), engine) as live:
        yield live


@pytest.fixture
def seen(live: Live, watched: Watched, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    def noting(name: str, work: Any) -> Any:
        def noted(*given: Any, **kwargs: Any) -> Any:
            watched.threads.append((name, threading.get_ident()))
            return work(*given, **kwargs)

        return noted

    for module, name in WORK:
        monkeypatch.setattr(module, name, noting(name, getattr(module, name)))
    watched.threads.clear()
    return watched.threads


def _loop_thread(live: Live) -> int:
    async def ident() -> int:
        return threading.get_ident()

    return asyncio.run_coroutine_threadsafe(ident(), live.bridge._loop).result(20)


CHAT = {"messages": [{"role": "user", "content": LONG}], "max_tokens": 2}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"enum": [LONG]}}}}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"enum": [LONG]}}}
ECHO = {"prompt": list(LONG.encode())[:3000], "echo": True, "logprobs": 2, "max_tokens": 1}


@pytest.mark.parametrize(
    ("path", "body", "done"),
    [
        ("/v1/chat/completions", CHAT, {"_read", "_check_texts", "chat", "encode", "json_response", "structured"}),
        ("/v1/chat/completions", {**CHAT, "stream": True}, {"_read", "chat", "encode", "sampling_params"}),
        ("/v1/chat/completions", {**CHAT, "tools": [TOOL]}, {"_check", "plain_messages", "check_limits"}),
        ("/v1/chat/completions", {**CHAT, "response_format": SCHEMA}, {"structured", "sampling_params"}),
        ("/v1/completions", {"prompt": [LONG] * 3, "max_tokens": 2}, {"_read", "encode", "json_response"}),
        ("/v1/completions", ECHO, {"_read", "decode", "json_response"}),
        ("/v1/completions", {**ECHO, "stream": True}, {"_read", "decode"}),
        ("/tokenize", {"prompt": LONG, "return_token_strs": True}, {"_read", "encode", "json_response"}),
        ("/tokenize", {"messages": CHAT["messages"], "tools": [TOOL]}, {"chat", "encode", "json_response"}),
        ("/detokenize", {"tokens": list(LONG.encode())}, {"_read", "decode", "json_response"}),
        # Short ones, of which a template may make anything.
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, {"chat", "encode"}),
        ("/tokenize", {"messages": [{"role": "user", "content": "x"}]}, {"chat", "encode"}),
    ],
)
def test_long_requests_are_read_and_answered_beside_the_loop(live, seen, path, body, done):
    answer = httpx.post(live.url + path, json=body)
    assert answer.status_code == 200, answer.text[:300]
    assert done <= {name for name, _ in seen}
    long = len(json.dumps(body)) > bodies.INLINE
    in_loop = {name for name, thread in seen if thread == _loop_thread(live)}
    assert in_loop <= (set() if long else {"_check_texts"})


@pytest.mark.parametrize(
    ("content", "code", "param"),
    [
        (b'{"prompt": "' + b"x" * 5000 + b'", "temprature": 1}', "unknown_parameter", "temprature"),
        (b'{"prompt": "' + b"x" * 5000, "invalid_json", None),
        (b'{"prompt": "' + b"\xff" * 5000 + b'"}', "invalid_json", None),
        (b"[" * 60_000, "invalid_json", None),
        (b"[" * 200_000, "too_many_containers", None),
        (b'{"n": ' + b"1" * 5000 + b', "prompt": "x"}', "invalid_json", None),
        (b"[" + b"0," * 5000 + b"0]", "invalid_type_or_value", None),
        (b'{"stop": [' + b"0," * 5000 + b"0]}", "invalid_type_or_value", "stop.0"),
        (b'{"prompt": [' + b"[]," * 70_000 + b"[]]}", "too_many_containers", None),
        (b"{" + b",".join(b'"%x":1' % i for i in range(70_000)) + b"}", "too_many_containers", None),
        (b'{"prompt": [' + b"7," * 70_000 + b"-7]}", "invalid_type_or_value", "prompt.70000"),
        (b'{"prompt": [[1], [' + b"7," * 40_000 + b'"7"]]}', "invalid_type_or_value", "prompt.1.40000"),
        (('{"messages": [' + '{"a":[{}]},' * 30_000 + "0]}").encode("utf-16"), "too_many_containers", None),
    ],
)
def test_long_bodies_are_refused_as_short_ones_are(live, seen, content, code, param):
    answer = httpx.post(f"{live.url}/v1/completions", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == (code, param)
    assert _loop_thread(live) not in {thread for _, thread in seen}
    wrong = httpx.post(f"{live.url}/v1/completions", content=content, headers={"content-type": "text/plain"})
    assert wrong.json()["error"]["code"] == "invalid_type_or_value"


def test_long_bodies_are_read_one_at_a_time(live, monkeypatch):
    under_way, most, read = [], [], bodies._read

    def noted(model: Any, body: bytes) -> Any:
        under_way.append(body)
        most.append(len(under_way))
        time.sleep(0.02)  # the others come meanwhile
        try:
            return read(model, body)
        finally:
            under_way.remove(body)

    monkeypatch.setattr(bodies, "_read", noted)
    with ThreadPoolExecutor(4) as pool:
        answers = pool.map(lambda n: httpx.post(f"{live.url}/tokenize", json={"prompt": LONG * n}), range(1, 5))
        assert [answer.status_code for answer in answers] == [200] * 4
    assert most == [1] * 4


def test_other_threads_may_run_between_any_two_numbers(seed, monkeypatch):
    draw, called = random.Random(seed), []
    for name in ("_whole", "_decimal"):
        work = getattr(bodies, name)
        monkeypatch.setattr(bodies, name, lambda text, work=work: called.append(text) or work(text))
    prompt, chosen = [draw.randrange(1 << 31) for _ in range(2000)], draw.random()
    body = {"prompt": prompt, "top_p": chosen, "temperature": 1e-9 * draw.random(), "seed": -(2**63)}
    found = bodies._read(CompletionRequest, json.dumps(body).encode())
    assert {name: getattr(found, name) for name in body} == body
    assert len(called) == 2003


def test_long_lists_of_tokens_are_checked_in_pieces(seed):
    draw, seen = random.Random(seed), []
    for length in (base.PIECE, base.PIECE + 1, 3 * base.PIECE + draw.randrange(base.PIECE)):
        tokens = [draw.randrange(1 << 31) for _ in range(length)]
        assert base._in_pieces(tokens, lambda piece: seen.append(piece) or piece) == tokens
        assert [token for piece in seen for token in piece] == tokens
        assert max(map(len, seen)) <= base.PIECE
        seen.clear()


TEXTS = ("[", "{", ":", '"', "\\", "\\\\", '\\"', "a", "∢", "\n")


def _drawn(draw: random.Random, depth: int) -> Any:
    inside = [_drawn(draw, depth - 1) for _ in range(draw.randrange(4))] if depth else []
    text = "".join(draw.choices(TEXTS, k=draw.randrange(6)))
    return draw.choice([text, inside, {f"{text}{i}": value for i, value in enumerate(inside)}, 3])


def _containers(value: Any) -> int:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    keys = len(value) if isinstance(value, dict) else 0
    return isinstance(value, dict | list) + keys + sum(map(_containers, inside))


def test_lists_objects_and_keys_are_counted_and_marks_of_texts_are_not(seed, monkeypatch):
    draw = random.Random(seed)
    for _ in range(300):
        value = [_drawn(draw, 4), _drawn(draw, 4)]
        text, count = json.dumps(value, ensure_ascii=draw.random() < 0.5), _containers(value)
        monkeypatch.setattr(bodies, "MOST_CONTAINERS", count)
        bodies._check_containers(text)
        monkeypatch.setattr(bodies, "MOST_CONTAINERS", count - 1)
        with pytest.raises(BadRequestError, match=f"has {count} lists, objects and keys; expected at most {count - 1}"):
            bodies._check_containers(text)
