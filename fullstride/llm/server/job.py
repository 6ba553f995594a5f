"""Engine requests of one HTTP request, as one asynchronous stream of deltas."""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

from fullstride.llm.outputs import Delta, Pooling
from fullstride.llm.sampling_params import SamplingParams
from fullstride.llm.server.errors import ApiError


@dataclass(frozen=True)
class EnginePrompt:
    """Request to the engine; `adapter`, `pooling` and `cache_salt` are as in `Engine.add`."""

    token_ids: Sequence[int]
    params: SamplingParams
    adapter: str | None = None
    pooling: Pooling | None = None
    cache_salt: str = ""


class EngineJob:
    """Prompts that are served together; iterate it for (which prompt, delta) until all completions have ended.

    It lives on the event loop and is touched there only. Either every completion gets its one last delta, or the
    iteration raises one error, after the deltas that came before it.
    """

    def __init__(self, prompts: Sequence[EnginePrompt], request_ids: Sequence[str]):
        """Wait for deltas of these requests to the engine."""
        self.prompts = prompts
        self.request_ids = request_ids
        self.completions = sum(prompt.params.n for prompt in prompts)
        self.arrived = perf_counter()
        self.started = False  # by the engine
        self.first_token: float | None = None
        self.prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        self.generated_tokens = 0
        self.began: float | None = None  # the engine's first step with it
        self.seen: dict[tuple[str, int], float] = {}  # when a completion's latest tokens came
        self.lengths: dict[tuple[str, int], int] = {}  # of completions so far
        self.timers: list[asyncio.TimerHandle] = []
        self._of = {request_id: i for i, request_id in enumerate(request_ids)}
        self._cached = [0] * len(prompts)
        self._left = self.completions
        self._error: ApiError | None = None
        self._deltas: deque[tuple[int, Delta]] = deque()
        self._news = asyncio.Event()

    @property
    def ended(self) -> bool:
        """Return whether no more deltas will come."""
        return self._left == 0 or self._error is not None

    @property
    def cached_tokens(self) -> int:
        """Number of prompt tokens found in the prefix cache."""
        return sum(self._cached)

    def put(self, delta: Delta) -> None:
        """Add a delta."""
        which = self._of[delta.request_id]
        self._cached[which] = max(self._cached[which], delta.cached_tokens)
        self._left -= delta.finish_reason is not None
        self._deltas.append((which, delta))
        self._news.set()

    def fail(self, error: ApiError) -> None:
        """End with an error; only the first one is kept."""
        if not self.ended:
            self._error = error
            self._news.set()

    def __aiter__(self) -> "EngineJob":
        """Return the job itself: it can be read once."""
        return self

    async def __anext__(self) -> tuple[int, Delta]:
        """Return the next delta, and the index of its prompt.

        Raises:
            ApiError: why the job failed.

        """
        await self.begun()
        if not self._deltas:
            raise StopAsyncIteration
        which, delta = self._deltas.popleft()
        # Of what was read, however far ahead the engine is.
        self.generated_tokens += len(delta.token_ids)
        return which, delta

    async def begun(self) -> None:
        """Wait for the next delta, which stays to be read, or for the end.

        Raises:
            ApiError: why the job failed.

        """
        while not self._deltas and self._left:
            if self._error is not None:
                raise self._error
            self._news.clear()
            await self._news.wait()
