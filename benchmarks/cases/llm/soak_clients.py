"""Clients of `benchmarks llm --workload soak` in a process of their own, which send mixed requests for hours."""

import asyncio
import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from multiprocessing.connection import Connection
from typing import Any

import httpx

from benchmarks.cases.llm.clients import DATA, LONGEST

CLIENTS = 8
ANSWER = 12  # tokens of an answer, at most
PATH = "/v1/completions"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "yy"]}},
    "required": ["a"],
    "additionalProperties": False,
}
Send = Callable[[httpx.AsyncClient, dict[str, Any]], Coroutine[Any, Any, None]]


async def _whole(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    _check(await client.post(PATH, json=body))


async def _schema(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    """Ask for an object, of which as much as the answer has room for has to come."""
    _check(await client.post(PATH, json=body | {"structured_outputs": {"json": SCHEMA}, "ignore_eos": False}))


async def _stream(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    async with client.stream("POST", PATH, json=body | {"stream": True}) as response:
        lines = [line async for line in response.aiter_lines() if line.startswith(DATA)]
        _check(response, "".join(lines))
    if "[DONE]" not in lines[-1] or "error" in json.loads(lines[-2].removeprefix(DATA)):
        raise RuntimeError(f"a stream ended early: {lines[-2:]}")


async def _left(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    """Leave a stream after its first part."""
    async with client.stream("POST", PATH, json=body | {"stream": True}) as response:
        _check(response, "")
        async for line in response.aiter_lines():
            if line.startswith(DATA):
                return


def _check(response: httpx.Response, text: str | None = None) -> None:
    if response.status_code != httpx.codes.OK:
        raise RuntimeError(f"{response.status_code}: {response.text if text is None else text}")


KINDS: dict[str, Send] = {"whole": _whole, "stream": _stream, "left": _left, "schema": _schema}


def soak(parent: Connection, asked: dict[str, Any]) -> None:
    """Send for each part what was asked: how many requests of each `counts`, and the `times` of whole ones in ms.

    Asked are `url`, `models` that take turns, `vocab`, tokens of a `prompt`, `seconds` of a part, and `parts`.
    """
    asyncio.run(_soak(parent, asked))


async def _soak(parent: Connection, asked: dict[str, Any]) -> None:
    async with httpx.AsyncClient(base_url=asked["url"], timeout=LONGEST, trust_env=False) as client:
        draws = [random.Random(number) for number in range(CLIENTS)]
        for _ in range(asked["parts"]):
            until = time.perf_counter() + asked["seconds"]
            found = await asyncio.gather(*(_client(client, asked, draw, until) for draw in draws))
            counts = sum((counts for counts, _ in found), Counter[str]())
            parent.send({"counts": dict(sorted(counts.items())), "times": [ms for _, times in found for ms in times]})


async def _client(
    client: httpx.AsyncClient, asked: dict[str, Any], draw: random.Random, until: float
) -> tuple[Counter[str], list[float]]:
    """Send requests one after the other, each kind once at least."""
    counts, times = Counter[str](), []
    for kind in itertools.chain(KINDS, iter(lambda: draw.choice([*KINDS]), None)):
        if len(times) > 1 and time.perf_counter() >= until:
            return counts, times
        prompt = [draw.randrange(3, asked["vocab"]) for _ in range(asked["prompt"])]
        body = {"model": draw.choice(asked["models"]), "prompt": prompt, "n": draw.choice((1, 1, 2))}
        body |= {"max_tokens": draw.randint(2, ANSWER), "temperature": draw.choice((0, 1)), "ignore_eos": True}
        started = time.perf_counter()
        await KINDS[kind](client, body)
        counts[kind] += 1
        times += [1e3 * (time.perf_counter() - started)] if kind == "whole" else []
    raise AssertionError  # the kinds have no end
