"""Clients of `benchmarks llm --workload hostile` in separate processes: ordinary clients and attackers.

An attack says when it begins, and ends when it is told. Each is the costliest request of its kind that a server reads.
"""

import asyncio
import contextlib
import itertools
import json
import random
import select
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from threading import Event
from typing import Any

import httpx

from benchmarks.cases.llm.clients import LONGEST, clients, found_by

# Seconds between an answer and its client's next small request.
PAUSE = 0.01
CHUNK = b"a" * 65536
# Status of a connection that was closed before its answer could be read.
CUT_OFF = "cut off"
# As many messages, and lists, as a server takes by default; nested ones are a few less, for those around them.
MESSAGES, LISTS = 2048, 65_536
NESTED = LISTS - 16
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
# What ordinary clients request.
KINDS = ("request", "chat", "health")
STOPS, DOUBLED = 10_000, 60


def waited(asked: dict[str, Any]) -> dict[str, list[float]]:
    """Return milliseconds of each small completion, `request`, each small `chat` and each `health`; the first connects.

    Asked are `url`, `model`, its `vocab`, tokens of a `prompt`, and the `seconds` of sending requests. GateError
    with the server's message if a request was refused or not answered.
    """
    with clients(_waited, asked) as worker:
        return found_by(worker)


@contextlib.contextmanager
def attack(asked: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Send one of `ATTACKS` repeatedly; each client finishes its current request.

    Asked are `url`, the `attack`, its `size` in bytes, and how many `clients` send it. What is yielded has at the
    end `answers`, how many requests got which status, and the `seconds` of all. GateError if the process of the
    attack fails.
    """
    found: dict[str, Any] = {}
    with clients(_attack, asked) as worker:
        found_by(worker)  # that it has begun
        yield found
        worker.tell(None)
        found |= found_by(worker)


def _waited(parent: Connection, asked: dict[str, Any]) -> None:
    parent.send(asyncio.run(_wait(asked)))


async def _wait(asked: dict[str, Any]) -> dict[str, list[float]]:
    """Run one client per kind of request, sending at least two requests one after the other."""
    until = time.perf_counter() + asked["seconds"]
    draw = random.Random(0)

    async def repeat(send: Callable[[], Awaitable[httpx.Response]]) -> list[float]:
        times: list[float] = []
        while len(times) < 2 or time.perf_counter() < until:
            started = time.perf_counter()
            response = await send()
            times.append(1e3 * (time.perf_counter() - started))
            if response.status_code != httpx.codes.OK:
                raise RuntimeError(f"{response.status_code}: {response.text}")
            await asyncio.sleep(PAUSE)
        return times

    def small() -> dict[str, Any]:
        prompt = [draw.randrange(3, asked["vocab"]) for _ in range(asked["prompt"])]
        return {"model": asked["model"], "prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True}

    def chat() -> dict[str, Any]:
        messages = [{"role": "user", "content": f"{draw.randrange(10_000)}"}]
        return {"model": asked["model"], "messages": messages, "max_tokens": 1, "temperature": 0}

    async with httpx.AsyncClient(base_url=asked["url"], timeout=LONGEST, trust_env=False) as client:
        times = await asyncio.gather(
            repeat(lambda: client.post(COMPLETIONS, json=small())),
            repeat(lambda: client.post(CHATS, json=chat())),
            repeat(lambda: client.get("/health")),
        )
    return dict(zip(KINDS, times, strict=True))


def _bodies(web: httpx.Client, path: str, bodies: list[bytes], stop: Event) -> Iterator[str]:
    """Return the statuses of consecutive requests, at least one, until told to stop."""
    for body in itertools.cycle(bodies):
        yield str(web.post(path, content=body, headers={"content-type": "application/json"}).status_code)
        if stop.is_set():
            return


def _headers(web: httpx.Client, path: str, stop: Event) -> Iterator[str]:
    """Return the statuses of endless headers, which go on until a response arrives."""
    host, port = web.base_url.host, web.base_url.port
    while True:
        with socket.create_connection((host, port), timeout=LONGEST) as connection:
            yield _endless(connection, path)
        if stop.is_set():
            return


def _endless(connection: socket.socket, path: str) -> str:
    with contextlib.suppress(OSError, IndexError):
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nX-Long: ".encode())
        while not select.select([connection], [], [], 0)[0]:
            connection.sendall(CHUNK)
        return connection.recv(4096).split()[1].decode()
    return CUT_OFF


def _attack(parent: Connection, asked: dict[str, Any]) -> None:
    stop, of = Event(), ATTACKS[asked["attack"]]
    # Written before it begins, so that the server has all of this machine.
    bodies = [body.encode() for body in of.bodies(asked["size"])] if of.bodies else None

    def send(_: int) -> Counter[str]:
        with httpx.Client(base_url=asked["url"], timeout=LONGEST, trust_env=False) as web:
            return Counter(_headers(web, of.path, stop) if bodies is None else _bodies(web, of.path, bodies, stop))

    with ThreadPoolExecutor(asked["clients"]) as pool:
        started = time.perf_counter()
        counts = pool.map(send, range(asked["clients"]))
        parent.send({})
        parent.recv()
        stop.set()
        answers = sum(counts, Counter[str]())
    parent.send({"answers": dict(sorted(answers.items())), "seconds": time.perf_counter() - started})


@dataclass(frozen=True)
class Attack:
    """Kind of request that attacks the server."""

    status: int  # of its answers
    path: str  # of the route
    # By their size in bytes, texts of JSON objects; sent in turn. None for a header without end.
    bodies: Callable[[int], list[str]] | None = None


def _text(size: int) -> list[str]:
    return [json.dumps({"prompt": ("the quick brown fox jumps " * (size // 26 + 1))[:size]})]


def _chat(size: int) -> list[str]:
    empty = {"role": "user", "content": ""}
    messages = [{**empty, "content": "x " * ((size // MESSAGES - len(json.dumps(empty))) // 2)}] * MESSAGES
    return [json.dumps({"messages": messages, "max_tokens": 1})]


def _schemas(size: int) -> list[str]:
    """Build small schemas with large grammars; several, because compiled ones are cached."""
    costly = [{"type": "integer", "multipleOf": 9_999_999 - 2 * turn, "minimum": -(10**15)} for turn in range(100)]
    return [json.dumps({"prompt": "x", "max_tokens": 1, "structured_outputs": {"json": schema}}) for schema in costly]


def _checks(size: int) -> list[str]:
    """Build a schema whose grammar is small, and whose check takes 2^60 steps."""
    doubled = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(DOUBLED)} | {f"d{DOUBLED}": {}}
    schema = {"type": "object", "properties": {}, "additionalProperties": False, "not": {"$ref": "#/$defs/d0"}}
    shape = {"json": schema | {"$defs": doubled}}
    return [json.dumps({"prompt": "x", "max_tokens": 40, "temperature": 0, "structured_outputs": shape})]


def _stops(size: int) -> list[str]:
    width = size // STOPS - len('"", ')
    return [json.dumps({"prompt": "x", "max_tokens": 1, "stop": [f"{i:0{width}}" for i in range(STOPS)]})]


def _biases(size: int) -> list[str]:
    count = size // len('"100000": 1, ')
    return [json.dumps({"prompt": "x", "max_tokens": 1, "logit_bias": {f"{100_000 + i}": 1 for i in range(count)}})]


def _completions(size: int) -> list[str]:
    return [json.dumps({"prompt": "x", "n": 16, "max_tokens": 16, "ignore_eos": True})]


def _brackets(size: int) -> list[str]:
    """Build schemas of lists: too many, the deepest allowed nesting, and many siblings with a long text."""
    nested, flat = "[" * NESTED + "]" * NESTED, ",".join(["[]"] * NESTED)
    prompts = ",".join(["[]"] * (size // 3)), nested, f'{flat},"{"x" * (size - len(flat))}"'
    return [f'{{"prompt":[{prompt}]}}' for prompt in prompts]


def _numbers(size: int) -> list[str]:
    return [f'{{"prompt":[{",".join("7" * (size // 2))}]}}']


ATTACKS: Mapping[str, Attack] = {
    "a long text to tokenize": Attack(200, "/tokenize", _text),
    "a long chat": Attack(400, CHATS, _chat),
    "a costly schema": Attack(400, COMPLETIONS, _schemas),
    "a costly check": Attack(200, COMPLETIONS, _checks),
    "stop texts": Attack(400, COMPLETIONS, _stops),
    "logit biases": Attack(400, COMPLETIONS, _biases),
    "16 completions": Attack(200, COMPLETIONS, _completions),
    "a header without end": Attack(431, "/health"),
    "brackets": Attack(400, COMPLETIONS, _brackets),
    "numbers": Attack(400, COMPLETIONS, _numbers),
}
