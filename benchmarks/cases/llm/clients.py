"""Clients of `benchmarks llm --workload serve` in a separate process, which times what it receives."""

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from multiprocessing.connection import Connection
from typing import Any

import httpx

from benchmarks.harness.process_pool import Worker
from fullstride.measure.gate import GateError

DATA, END = "data: ", "data: [DONE]"
# Every part says how many tokens there are so far: a part may have several, the first one, too.
STREAMED = {"include_usage": True, "continuous_usage_stats": True}
# Seconds that a client waits for the next part.
LONGEST = 3600.0
# Parts of an answer: its beginning, its end, and the number of tokens.
LEAST = 3


@dataclass(frozen=True)
class ClientRequest:
    """Requests that the clients send to a server."""

    url: str  # of the server
    models: tuple[str, ...]  # its names, of which each client has one: they take turns
    # Prompts of each client as token ids; a client sends one request after the other.
    slots: list[list[list[int]]]
    answer: int  # tokens of an answer
    temperature: float  # of all


@dataclass(frozen=True)
class Heard:
    """Arrival times of the answers of all clients."""

    seconds: float  # from the first question to the end of the last answer
    firsts: list[float]  # milliseconds from each question to the first text of its answer
    paces: list[float]  # milliseconds a token after that part
    tokens: int  # of all answers, as the server counts them


def ask(asked: ClientRequest) -> Heard:
    """Run all clients in a separate process; GateError with its message if a request was refused or unanswered."""
    with clients(_hear, asked) as worker:
        return found_by(worker)


@contextlib.contextmanager
def clients(work: Callable[..., None], asked: Any) -> Iterator[Worker]:
    """Run clients' work, a function of a line of messages and the request, in a process that ends with the block."""
    worker = Worker(work, asked)
    try:
        yield worker
    finally:
        worker.end()


def found_by(worker: Worker) -> Any:
    """Return the result that a clients' process sends; GateError with what it says instead if it failed."""
    if isinstance(found := worker.heard(), str):
        raise GateError(f"the clients' process failed: {found}")
    return found


def _hear(parent: Connection, asked: ClientRequest) -> None:
    parent.send(asyncio.run(heard(asked)))


async def _answer(
    client: httpx.AsyncClient, asked: ClientRequest, model: str, prompt: list[int]
) -> tuple[float, float, int]:
    """Return milliseconds until the first part, milliseconds per token after it, and the number of tokens."""
    body = {"model": model, "prompt": prompt, "max_tokens": asked.answer, "temperature": asked.temperature}
    body |= {"ignore_eos": True, "stream": True, "stream_options": STREAMED}
    started = time.perf_counter()
    arrived: list[tuple[float, str]] = []
    async with client.stream("POST", f"{asked.url}/v1/completions", json=body) as response:
        if response.status_code != httpx.codes.OK:
            raise RuntimeError(f"{response.status_code}: {(await response.aread()).decode()}")
        async for line in response.aiter_lines():
            if line.startswith(DATA) and line != END:
                arrived.append((time.perf_counter(), line))
    # Read when nothing is timed any more. The last part has the number of tokens and none of the answer.
    parts = [json.loads(line.removeprefix(DATA)) for _, line in arrived]
    if len(parts) < LEAST or "error" in parts[-1]:
        raise RuntimeError(f"an answer ended early: {parts[-1:]}; expected several tokens and a text")
    begun, tokens = (part["usage"]["completion_tokens"] for part in (parts[0], parts[-1]))
    first, last = arrived[0][0], arrived[-2][0]
    return 1e3 * (first - started), 1e3 * (last - first) / max(1, tokens - begun), tokens


async def heard(asked: ClientRequest) -> Heard:
    """Send the requests of all clients at once."""

    async def ask_in_turn(model: str, prompts: list[list[int]]) -> list[tuple[float, float, int]]:
        return [await _answer(client, asked, model, prompt) for prompt in prompts]

    limits = httpx.Limits(max_connections=None)
    # A proxy of the environment's would stand before this machine, too.
    async with httpx.AsyncClient(timeout=LONGEST, limits=limits, trust_env=False) as client:
        started = time.perf_counter()
        slots = await asyncio.gather(*map(ask_in_turn, cycle(asked.models), asked.slots))
        seconds = time.perf_counter() - started
    firsts, paces, tokens = zip(*(answer for slot in slots for answer in slot), strict=True)
    return Heard(seconds, list(firsts), list(paces), sum(tokens))
