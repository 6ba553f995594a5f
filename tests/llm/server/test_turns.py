"""Turns go round the clients, and none is lost."""

import asyncio

import httpx
import pytest

from fullstride.llm.server.turns import CLIENT, Turns
from tests.llm.server.fake_engine import FakeEngine
from tests.llm.server.live import fake_server


async def visit(turns: Turns, client: str, number: int, seen: list[str], work: asyncio.Event) -> None:
    CLIENT.set(client)
    async with turns:
        seen.append(f"{client}{number}")
        await work.wait()


async def all_of(places: int, arrivals: str, given_up: str = "") -> list[str]:
    """The order in which requests have their turn, of clients named by letters that arrive in this order."""
    turns, work = Turns(places), asyncio.Event()
    seen: list[str] = []
    tasks = {}
    for client in arrivals:
        number = sum(name[0] == client for name in tasks)
        tasks[f"{client}{number}"] = asyncio.create_task(visit(turns, client, number, seen, work))
        await asyncio.sleep(0)
    for name in given_up.split():
        tasks.pop(name).cancel()
    work.set()
    await asyncio.gather(*tasks.values())
    # All places are free again.
    for _ in range(places):
        await asyncio.wait_for(turns.__aenter__(), 1)
    return seen


def test_a_client_with_many_requests_delays_its_own():
    assert asyncio.run(all_of(1, "aaaaaab")) == ["a0", "a1", "b0", "a2", "a3", "a4", "a5"]
    assert asyncio.run(all_of(1, "aabacb")) == ["a0", "a1", "b0", "c0", "a2", "b1"]
    assert asyncio.run(all_of(2, "aaaaab"))[:4] == ["a0", "a1", "a2", "b0"]


def test_turns_of_those_who_left_go_on_to_the_next():
    assert asyncio.run(all_of(1, "aaab", "a0 a1")) == ["a0", "b0", "a2"]
    assert asyncio.run(all_of(3, "abcabc", "a1 b1 c1")) == ["a0", "b0", "c0"]


@pytest.mark.parametrize(
    ("keys", "client"),
    [((), "203.0.113.7"), (("one",), "203.0.113.7"), (("other", "one"), "key 1")],
)
def test_a_request_knows_its_client(keys, client):
    """By its address, which a trusted proxy passes on, or by its key if there are several."""
    found: list[str] = []
    with fake_server(FakeEngine(script=lambda *_: b"ok"), api_keys=keys) as live:
        live.app.state.server.checking = _Recorded(found)
        tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
        body = {"messages": [{"role": "user", "content": "?"}], "tools": [tool]}
        headers = {"x-forwarded-for": "198.51.100.9, 203.0.113.7", "authorization": "Bearer one"}
        assert httpx.post(f"{live.url}/v1/chat/completions", json=body, headers=headers).status_code == 200
    assert set(found) == {client}


class _Recorded(Turns):
    def __init__(self, found: list[str]):
        super().__init__(1)
        self.found = found

    async def __aenter__(self) -> None:
        self.found.append(CLIENT.get())
        await super().__aenter__()
