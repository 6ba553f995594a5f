"""Hundreds of clients of a model and two LoRA adapters, of which many go away, on a pool too small for them."""

import asyncio
import contextlib
import json
import random
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import httpx

from fullstride.llm.engine import Engine
from fullstride.llm.outputs import Delta
from tests.llm.engine.conftest import Costs
from tests.llm.server.live import Live, until
from tests.llm.server.real import real_server

CLIENTS = 200
LEAVING = 24  # clients before them, all of which go away
MOST_TOKENS = 24
STEPS = 4  # enough for the first tokens of some, too few for anybody's last: a step makes two of a completion
MODELS = ("tiny", "wide", "thin")
PROMPTS = ("The quick brown fox", "What is the capital", "naïve café, 東京", "def square(x):\n    return")


def _body(draw: random.Random) -> dict[str, Any]:
    body = {
        "model": draw.choice(MODELS),
        "prompt": draw.choice(PROMPTS),
        "temperature": 0,
        "ignore_eos": True,
        "max_tokens": draw.choice((4, 16, MOST_TOKENS)),
    }
    return {**body, "ignore_eos": True, "stream": draw.random() < 0.5, "n": draw.choice((1, 1, 1, 2))}


async def _client(http: httpx.AsyncClient, draw: random.Random) -> tuple[str, Any]:
    """One client: what became of its request, and the texts that it got."""
    body, leaves = _body(draw), draw.random() < 0.3
    await asyncio.sleep(draw.random() * 0.5)
    ask = _streamed(http, body, draw.randrange(4) if leaves else None) if body["stream"] else _whole(http, body)
    if not leaves or body["stream"]:
        return await ask
    try:
        return await asyncio.wait_for(ask, draw.random())
    except TimeoutError:
        return "left", None


async def _whole(http: httpx.AsyncClient, body: dict[str, Any]) -> tuple[str, Any]:
    answer = await http.post("/v1/completions", json=body)
    if answer.status_code != 200:
        return str(answer.status_code), None
    choices = answer.json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(body["n"]))
    assert all(choice["finish_reason"] == "length" for choice in choices)
    return "finished", [(_key(body), choice["text"]) for choice in choices]


async def _streamed(http: httpx.AsyncClient, body: dict[str, Any], events: int | None) -> tuple[str, Any]:
    texts, ends = Counter(), []
    found: dict[int, str] = {}
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            return str(answer.status_code), None
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line[6:])["choices"]
                texts[choice["index"]] += 1
                found[choice["index"]] = found.get(choice["index"], "") + choice["text"]
                ends += [choice["index"]] * (choice["finish_reason"] is not None)
            if line == "data: [DONE]":
                ends.append("done")
            if events is not None and sum(texts.values()) > events:
                return "left", None
    assert sorted(ends[:-1]) == list(range(body["n"]))
    assert ends[-1] == "done"
    return "finished", [(_key(body), text) for text in found.values()]


def _key(body: dict[str, Any]) -> tuple[str, str, int]:
    return body["model"], body["prompt"], body["max_tokens"]


def _many(live: Live) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=live.url, limits=httpx.Limits(max_connections=None), timeout=60)


async def _all(live: Live, seed: int) -> list[tuple[str, Any]]:
    async with _many(live) as http:
        return await asyncio.gather(*(_client(http, random.Random(f"{seed} {i}")) for i in range(CLIENTS)))


@contextlib.contextmanager
def _held(engine: Engine) -> Iterator[threading.Semaphore]:
    """The engine makes a step for each release of the semaphore, and goes on by itself afterwards."""
    allowed, step = threading.Semaphore(0), engine.step

    def when_allowed() -> list[Delta]:
        allowed.acquire()
        return step()

    try:
        with mock.patch.object(engine, "step", when_allowed):
            yield allowed
    finally:
        allowed.release()  # the step that waits; the next one is the engine's own


async def _leave(live: Live, engine: Engine) -> None:
    """Clients that go away while the engine has begun, but not finished, what they asked for.

    Those of the load go by the clock or at an early event, which on a busy machine may be before the server has heard
    of them or after the last token: how many leave work behind is chance, and can be none.
    """
    bodies = [{**_body(random.Random(i)), "stream": i % 2 == 0, "max_tokens": MOST_TOKENS} for i in range(LEAVING)]
    with _held(engine) as allowed:
        async with _many(live) as http:
            tasks = [asyncio.create_task(_streamed(http, body, 0)) for body in bodies if body["stream"]]
            await asyncio.to_thread(until, lambda: _accepted(live) == len(tasks))  # the engine takes them first
            tasks += [asyncio.create_task(_whole(http, body)) for body in bodies if not body["stream"]]
            await asyncio.to_thread(until, lambda: _accepted(live) == LEAVING)
            allowed.release(STEPS)
            first, waiting = await asyncio.wait(tasks, timeout=60, return_when=asyncio.FIRST_COMPLETED)
            for task in waiting:
                task.cancel()
            await asyncio.wait(tasks)
        assert {task.result() for task in first} == {("left", None)}
        # While the engine stands still: none of them can end in any other way.
        await asyncio.to_thread(until, lambda: _ended(live) == {"finished": 0, "disconnect": LEAVING})


def _accepted(live: Live) -> float:
    return live.app.state.server.metrics.registry.get_sample_value("fullstride_llm_requests_accepted_total") or 0


def _ended(live: Live) -> dict[str, float]:
    name, metrics = "fullstride_llm_requests_ended_total", live.app.state.server.metrics.registry
    return {
        outcome: metrics.get_sample_value(name, {"outcome": outcome}) or 0 for outcome in ("finished", "disconnect")
    }


def test_nothing_is_lost_under_load(tiny_engine, monkeypatch):
    loaded, engine = tiny_engine
    monkeypatch.setattr(engine._speculator, "times", Costs(0.0))  # drafts are verified whatever they cost
    before, compiles = engine.stats(), engine.stats().compiles
    with real_server(loaded, engine, queue=2 * CLIENTS) as live:
        asyncio.run(_leave(live, engine))
        results = asyncio.run(_all(live, 0))
        until(lambda: not engine.busy and live.bridge._open == 0)
        health = httpx.get(f"{live.url}/health").status_code
    became = Counter(outcome for outcome, _ in results)
    assert became.keys() == {"finished", "left"}
    assert became["finished"] > 0.6 * CLIENTS
    assert became["left"] > 0.1 * CLIENTS
    ended = _ended(live)
    assert _accepted(live) == sum(ended.values())
    # A client may leave when its answer is on its way already, or before its request has arrived.
    assert became["finished"] <= ended["finished"]
    assert ended["disconnect"] >= LEAVING
    after = engine.stats()
    assert after.preemptions > before.preemptions
    assert after.accepted_tokens > before.accepted_tokens
    assert (after.free_blocks, after.running, after.waiting) == (before.free_blocks, 0, 0)
    assert (after.compiles, health) == (compiles, 200)
    texts: dict[Any, set[str]] = {}
    for _, found in results:
        for key, text in found or ():
            texts.setdefault(key, set()).add(text)
    # Greedy: however it was batched, preempted or cached, a prompt has one continuation of each adapter.
    assert all(len(different) == 1 for different in texts.values())
    assert {key[:2] for key in texts} == {(model, prompt) for model in MODELS for prompt in PROMPTS}
    for prompt in PROMPTS:
        longest = [texts[key] for key in texts if key[1:] == (prompt, MOST_TOKENS)]
        assert len(set.union(*longest)) == len(longest)
