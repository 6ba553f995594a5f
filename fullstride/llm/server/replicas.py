"""Engines behind one server, each in its own thread, and the routing of prompts to them."""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from queue import SimpleQueue
from time import perf_counter
from typing import Protocol, runtime_checkable

from fullstride.errors import ConfigError
from fullstride.llm.outputs import Delta, EngineStats
from fullstride.llm.sampling_params import SamplingParams
from fullstride.llm.server.errors import ApiError, BadRequestError, EngineFailedError
from fullstride.llm.server.job import EnginePrompt

logger = logging.getLogger("fullstride.llm.server")
# How far above the least loaded engine one that knows more of a prompt may be, as a part of an engine's rows.
SLACK = 0.25


@runtime_checkable
class SteppingEngine(Protocol):
    """Protocol of the engine; all but its last two methods are called from one thread only."""

    @property
    def dead(self) -> str | None: ...
    @property
    def started(self) -> Sequence[str]: ...
    @property
    def busy(self) -> bool: ...
    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        arrived: float | None = None,
        adapter: str | None = None,
        cache_salt: str = "",
    ) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def step(self) -> list[Delta]: ...
    def stats(self) -> EngineStats: ...
    def block_hashes(self, prompt: Sequence[int], adapter: str | None = None, cache_salt: str = "") -> list[bytes]: ...
    def cached_prefix_blocks(self, names: Sequence[bytes]) -> int: ...


class EngineThread:
    """Thread that runs an engine's steps while there is work.

    Its listeners are called in this thread: `on_step(deltas, started, stats, began)`, `on_refused(request_id,
    error)` and, once, `on_death(error)`; `began` is when the step did, by `perf_counter`.
    """

    def __init__(
        self,
        engine: SteppingEngine,
        on_step: Callable[[list[Delta], Sequence[str], EngineStats, float], None],
        on_refused: Callable[[str, ApiError], None],
        on_death: Callable[[BaseException], None],
    ):
        """Prepare; `start` begins."""
        self._engine = engine
        self._on_step = on_step
        self._on_refused = on_refused
        self._on_death = on_death
        self._inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._step_began: float | None = None

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def add(self, requests: Mapping[str, EnginePrompt], arrived: float) -> None:
        """Give the engine requests, all or none of them, before its next step."""
        self._inbox.put(lambda: self._add(requests, arrived))

    def abort(self, request_id: str) -> None:
        """Abort a request before the next step."""
        self._inbox.put(lambda: self._engine.abort(request_id))

    def stop(self, seconds: float) -> bool:
        """End after the present step; whether it did in this time."""
        self._inbox.put(None)
        self._thread.join(min(seconds, threading.TIMEOUT_MAX))
        return not self._thread.is_alive()

    def step_seconds(self) -> float:
        """How long the present step has been going on; 0 between steps."""
        began = self._step_began
        return 0.0 if began is None else perf_counter() - began

    def _run(self) -> None:
        try:
            while self._obey():
                if not self._engine.busy:
                    continue
                self._step_began = began = perf_counter()
                deltas = self._engine.step()
                self._step_began = None
                self._on_step(deltas, self._engine.started, self._engine.stats(), began)
                if self._engine.dead is not None:
                    raise RuntimeError(self._engine.dead)
        except BaseException as error:
            logger.critical("the engine failed and no longer serves requests", exc_info=True)
            self._on_death(error)

    def _obey(self) -> bool:
        """Do what was asked for, waiting for it while there is nothing else to do; False to end."""
        while not (self._engine.busy and self._inbox.empty()):
            order = self._inbox.get()
            if order is None:
                return False
            order()
            if not self._engine.busy:
                self._on_step([], (), self._engine.stats(), perf_counter())
        return True

    def _add(self, requests: Mapping[str, EnginePrompt], arrived: float) -> None:
        for request_id, prompt in requests.items():
            try:
                own = {name: getattr(prompt, name) for name in ("adapter", "pooling", "cache_salt")}
                self._engine.add(request_id, prompt.token_ids, prompt.params, arrived=arrived, **own)
                continue
            except ConfigError as error:
                refusal = BadRequestError(str(error), code=getattr(error, "code", "cannot_be_served"))
            except Exception:
                # A fault in taking one request is that request's; a fault in a step is everybody's.
                logger.exception("the engine could not accept %s", request_id)
                refusal = EngineFailedError("The engine could not accept this request.")
            for other in requests:
                self._engine.abort(other)
            self._on_refused(request_id, refusal)
            return


class Replica:
    """Engine replica, as the event loop sees it.

    Attributes:
        number: from 0.
        thread: that the engine runs in.
        stats: after its latest step.
        death: why it serves no more.
        load: completions that it was given and that have not ended.

    """

    def __init__(
        self,
        number: int,
        engine: SteppingEngine,
        on_step: Callable[["Replica", list[Delta], Sequence[str], EngineStats, float], None],
        on_refused: Callable[[str, ApiError], None],
        on_death: Callable[["Replica", BaseException], None],
    ):
        """Prepare; its thread is still to be started."""
        self.number, self.engine, self.stats = number, engine, engine.stats()
        self.thread = EngineThread(engine, partial(on_step, self), on_refused, partial(on_death, self))
        self.death: BaseException | None = None
        self.load = self.chosen = 0
        self._coming: Counter[bytes] = Counter()

    def up(self, stall_seconds: float) -> bool:
        """Return whether the engine is alive and not stuck in a step."""
        return self.death is None and self.thread.step_seconds() < stall_seconds

    def known(self, names: Sequence[bytes]) -> int:
        """Blocks of a prompt that it has, or will have by the time: other prompts that it was given begin so."""
        found = self.engine.cached_prefix_blocks(names) if names else 0
        return next((i for i in range(found, len(names)) if names[i] not in self._coming), len(names))

    def enter(self, names: Sequence[bytes], completions: int) -> None:
        """Count a prompt that it was given."""
        self._coming.update(names)
        self.load += completions

    def leave(self, names: Sequence[bytes], completions: int) -> None:
        """Count a prompt that has ended."""
        for name in names:
            # Counter's own subtraction looks at all that it has.
            if self._coming[name] == 1:
                del self._coming[name]
            else:
                self._coming[name] -= 1
        self.load -= completions


class Router:
    """Router of prompts to engines.

    Of the engines that live and move, and whose load is at most `SLACK` of an engine's rows above the least, the one
    that knows the longest beginning of the prompt; of those that know as much the least loaded, and of those the one
    that was chosen longest ago.
    """

    def __init__(self, replicas: Sequence[Replica], concurrent: int, stall_seconds: float):
        """Route among these, each of which runs so many completions at once."""
        self._replicas, self._slack, self._stall = replicas, max(1, int(SLACK * concurrent)), stall_seconds
        self._turn = 0

    def names(self, prompt: EnginePrompt) -> list[bytes]:
        """Return the block hashes of a prompt; none if there is only one engine."""
        if len(self._replicas) == 1:
            return []
        return self._replicas[0].engine.block_hashes(prompt.token_ids, prompt.adapter, prompt.cache_salt)

    def choose(self, names: Sequence[bytes]) -> Replica:
        """Choose the engine for a prompt with these block hashes; at least one must be alive."""
        living = [replica for replica in self._replicas if replica.death is None]
        moving = [replica for replica in living if replica.up(self._stall)] or living
        least = min(replica.load for replica in moving)
        near = [replica for replica in moving if replica.load <= least + self._slack]
        best = max(near, key=lambda replica: (replica.known(names), -replica.load, -replica.chosen))
        self._turn += 1
        best.chosen = self._turn
        return best


def total(replicas: Sequence[Replica]) -> EngineStats:
    """Return the sum of the engines' statistics; compiles are counted per process."""
    stats = [replica.stats for replica in replicas]
    sums = {name: sum(getattr(each, name) for each in stats) for name in vars(stats[0])}
    return EngineStats(**sums | {"compiles": max(each.compiles for each in stats)})
