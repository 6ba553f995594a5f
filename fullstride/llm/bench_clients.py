"""Clients of `fullstride bench llm --workload serve`, in a process of their own: what is timed is what arrives there.

Run as a module, it reads what to ask from stdin and writes when answers came to stdout, both JSON.
"""

import asyncio
import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import httpx

DATA, END = "data: ", "data: [DONE]"


@dataclass(frozen=True)
class Asked:
    """What to ask of a server.

    Attributes:
        url: of the server.
        model: its name.
        slots: of each client, one of which asks one question after the other, the prompts as token ids.
        answer: tokens of an answer.
        temperature: of all.

    """

    url: str
    model: str
    slots: list[list[list[int]]]
    answer: int
    temperature: float


@dataclass(frozen=True)
class Heard:
    """When the answers of all clients came.

    Attributes:
        seconds: from the first question to the end of the last answer.
        firsts: milliseconds from each question to the first part of its answer.
        paces: milliseconds a token after that.
        tokens: of all answers, as the server counts them.

    """

    seconds: float
    firsts: list[float]
    paces: list[float]
    tokens: int


def ask(asked: Asked) -> Heard:
    """Have all clients ask, in a process of their own.

    Raises:
        RuntimeError: if the server refused a question, with its words.

    """
    command = [sys.executable, "-m", "fullstride.llm.bench_clients"]
    done = subprocess.run(command, input=json.dumps(asdict(asked)), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    return Heard(**json.loads(done.stdout))


async def _answer(client: httpx.AsyncClient, asked: Asked, prompt: list[int]) -> tuple[float, float, int]:
    """Milliseconds until the first part, milliseconds a token after it, and tokens."""
    body = {"model": asked.model, "prompt": prompt, "max_tokens": asked.answer, "temperature": asked.temperature}
    body |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
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
    if not parts or "error" in parts[-1]:
        raise RuntimeError(f"a stream ended early: {parts[-1:]}")
    tokens = parts[-1]["usage"]["completion_tokens"]
    first, last = arrived[0][0], arrived[-2][0]
    return 1e3 * (first - started), 1e3 * (last - first) / max(1, tokens - 1), tokens


async def _slot(client: httpx.AsyncClient, asked: Asked, prompts: list[list[int]]) -> list[tuple[float, float, int]]:
    return [await _answer(client, asked, prompt) for prompt in prompts]


async def heard(asked: Asked) -> Heard:
    """Ask with all clients at once."""
    async with httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None)) as client:
        started = time.perf_counter()
        slots = await asyncio.gather(*(_slot(client, asked, prompts) for prompts in asked.slots))
        seconds = time.perf_counter() - started
    firsts, paces, tokens = zip(*(answer for slot in slots for answer in slot), strict=True)
    return Heard(seconds, list(firsts), list(paces), sum(tokens))


def _main(given: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(asdict(asyncio.run(heard(Asked(**given))))))


if __name__ == "__main__":
    _main(json.load(sys.stdin))
