"""Hundreds of clients, of which many go away, on a pool that is too small for those who run."""

import asyncio
import json
import random
from collections import Counter
from typing import Any

import httpx

from tests.llm.server.live import Live, until
from tests.llm.server.real import real_server

CLIENTS, OVERTAKEN = 500, 100
PROMPTS = ("The quick brown fox", "What is the capital", "naïve café, 東京", "def square(x):\n    return")


def _body(draw: random.Random) -> dict[str, Any]:
    body = {
        "prompt": draw.choice(PROMPTS),
        "temperature": 0,
        "ignore_eos": True,
        "max_tokens": draw.choice((4, 16, 24)),
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
    return "finished", [(body["prompt"], body["max_tokens"], choice["text"]) for choice in choices]


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
    return "finished", [(body["prompt"], body["max_tokens"], text) for text in found.values()]


async def _overtaken(http: httpx.AsyncClient) -> None:
    """Clients who all go away when one has its answer; of the others here each may learn too late of its own."""
    body = {"prompt": PROMPTS[0], "temperature": 0, "ignore_eos": True, "max_tokens": 40, "n": 1}
    asking = [asyncio.create_task(_whole(http, body)) for _ in range(OVERTAKEN)]
    first, others = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
    for ask in others:
        ask.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    assert {ask.result()[0] for ask in first} == {"finished"}


async def _all(live: Live, seed: int) -> list[tuple[str, Any]]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=live.url, limits=limits, timeout=60) as http:
        found = await asyncio.gather(*(_client(http, random.Random(f"{seed} {i}")) for i in range(CLIENTS)))
        await _overtaken(http)
    return found


def test_nothing_is_lost_under_load(tiny_engine):
    loaded, engine = tiny_engine
    before, compiles = engine.stats(), engine.stats().compiles
    with real_server(loaded, engine, queue=2 * CLIENTS) as live:
        results = asyncio.run(_all(live, 0))
        metrics = live.app.state.server.metrics.registry
        until(lambda: not engine.busy and live.bridge._open == 0)
        health = httpx.get(f"{live.url}/health").status_code
    became = Counter(outcome for outcome, _ in results)
    assert became.keys() == {"finished", "left"}
    assert became["finished"] > 0.6 * CLIENTS
    assert became["left"] > 0.1 * CLIENTS
    ended = {
        outcome: metrics.get_sample_value("fullstride_llm_requests_ended_total", {"outcome": outcome}) or 0
        for outcome in ("finished", "disconnect")
    }
    accepted = metrics.get_sample_value("fullstride_llm_requests_accepted_total")
    assert accepted == sum(ended.values())
    # A client may leave when its answer is on its way already, or before its request has arrived.
    assert became["finished"] <= ended["finished"]
    assert ended["disconnect"] > 0
    after = engine.stats()
    assert after.preemptions > before.preemptions
    assert (after.free_blocks, after.running, after.waiting) == (before.free_blocks, 0, 0)
    assert (after.compiles, health) == (compiles, 200)
    texts: dict[Any, set[str]] = {}
    for _, found in results:
        for prompt, most, text in found or ():
            texts.setdefault((prompt, most), set()).add(text)
    # Greedy: however it was batched, preempted or cached, a prompt has one continuation.
    assert len(texts) == len(PROMPTS) * 3
    assert all(len(different) == 1 for different in texts.values())
