"""Turns at scarce work that go round the clients, so that one with many costly requests delays its own."""

import asyncio
from collections import OrderedDict, deque
from contextvars import ContextVar

# Client whose request is being handled: its API key if a server has several, else its address.
CLIENT: ContextVar[str] = ContextVar("client", default="")


class Turns:
    """Limiter of concurrent work, entered by `async with`; of those who wait, each client has a turn after another."""

    def __init__(self, places: int):
        """Let so many work at the same time."""
        self._free = places
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # by client, in turn

    async def __aenter__(self) -> None:
        """Wait for a turn."""
        if self._free:
            self._free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(CLIENT.get(), deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it came at the same time
                self._pass_on()
            raise

    async def __aexit__(self, *_: object) -> None:
        """Pass the turn on."""
        self._pass_on()

    def _pass_on(self) -> None:
        while self._waiting:
            client, turns = self._waiting.popitem(last=False)
            turn = turns.popleft()
            if turns:
                self._waiting[client] = turns
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
