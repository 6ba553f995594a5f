"""The engine in a thread of its own: it takes requests between steps and hands out what came of them."""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from time import monotonic
from typing import Protocol, runtime_checkable

from fullstride.errors import ConfigError
from fullstride.llm.outputs import Delta, EngineStats
from fullstride.llm.sampling_params import SamplingParams
from fullstride.llm.server.errors import ApiError, BadRequestError, EngineFailedError
from fullstride.llm.server.job import Prompt

logger = logging.getLogger("fullstride.llm.server")


@runtime_checkable
class Steps(Protocol):
    """What of `fullstride.llm.engine.Engine` is used; but for the last two, from one thread alone."""

    @property
    def dead(self) -> str | None: ...
    @property
    def started(self) -> Sequence[str]: ...
    @property
    def busy(self) -> bool: ...
    def add(
        self, request_id: str, prompt: Sequence[int], params: SamplingParams, *, arrived: float | None = None
    ) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def step(self) -> list[Delta]: ...
    def stats(self) -> EngineStats: ...
    def names(self, prompt: Sequence[int]) -> list[bytes]: ...
    def held(self, names: Sequence[bytes]) -> int: ...


class EngineThread:
    """Runs the engine's steps while there is something to do.

    Its listeners are called in this thread: `on_step(deltas, started, stats)`, `on_refused(request_id, error)` and,
    once, `on_death(error)`.
    """

    def __init__(
        self,
        engine: Steps,
        on_step: Callable[[list[Delta], Sequence[str], EngineStats], None],
        on_refused: Callable[[str, ApiError], None],
        on_death: Callable[[BaseException], None],
    ):
        """Prepare; `start` begins."""
        self._engine, self._on_step, self._on_refused, self._on_death = engine, on_step, on_refused, on_death
        self._inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._step_began: float | None = None

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def add(self, requests: Mapping[str, Prompt], arrived: float) -> None:
        """Give the engine requests, all or none of them, before its next step."""
        self._inbox.put(lambda: self._add(requests, arrived))

    def abort(self, request_id: str) -> None:
        """Take it back before the next step."""
        self._inbox.put(lambda: self._engine.abort(request_id))

    def stop(self, seconds: float) -> bool:
        """End after the present step; whether it did in this time."""
        self._inbox.put(None)
        self._thread.join(min(seconds, threading.TIMEOUT_MAX))
        return not self._thread.is_alive()

    def step_seconds(self) -> float:
        """How long the present step has been going on; 0 between steps."""
        began = self._step_began
        return 0.0 if began is None else monotonic() - began

    def _run(self) -> None:
        try:
            while self._obey():
                if not self._engine.busy:
                    continue
                self._step_began = monotonic()
                deltas = self._engine.step()
                self._step_began = None
                self._on_step(deltas, self._engine.started, self._engine.stats())
                if self._engine.dead is not None:
                    raise RuntimeError(self._engine.dead)
        except BaseException as error:
            logger.critical("the engine died and serves no more", exc_info=True)
            self._on_death(error)

    def _obey(self) -> bool:
        """Do what was asked for, waiting for it while there is nothing else to do; False to end."""
        while not (self._engine.busy and self._inbox.empty()):
            order = self._inbox.get()
            if order is None:
                return False
            order()
            if not self._engine.busy:
                self._on_step([], (), self._engine.stats())
        return True

    def _add(self, requests: Mapping[str, Prompt], arrived: float) -> None:
        for request_id, prompt in requests.items():
            try:
                self._engine.add(request_id, prompt.token_ids, prompt.params, arrived=arrived)
                continue
            except ConfigError as error:
                refusal = BadRequestError(str(error), code="cannot_be_served")
            except Exception:
                # A fault in taking one request is that request's; a fault in a step is everybody's.
                logger.exception("the engine could not take %s", request_id)
                refusal = EngineFailedError("The engine could not take this request.")
            for other in requests:
                self._engine.abort(other)
            self._on_refused(request_id, refusal)
            return
