"""Between the requests of an event loop and the engine's thread: admission, deadlines, one end for every request."""

import asyncio
import itertools
import logging
import math
from collections.abc import Sequence
from time import perf_counter

from fullstride.llm.outputs import Delta, EngineStats
from fullstride.llm.server.engine_thread import EngineThread, Steps
from fullstride.llm.server.errors import (
    ApiError,
    BadRequestError,
    EngineFailedError,
    OverloadedError,
    RefusedError,
    TimedOutError,
    UnavailableError,
)
from fullstride.llm.server.job import Job, Prompt
from fullstride.llm.server.limits import Limits
from fullstride.llm.server.metrics import Metrics

logger = logging.getLogger("fullstride.llm.server")


class Bridge:
    """Lives on one event loop; only the two `_from_engine` hand-overs come from the engine's thread.

    A job is accepted or refused at once. An accepted one ends in exactly one way: all of its completions finish, it
    fails with one error, or nobody waits for it any more and it is aborted.
    """

    def __init__(self, engine: Steps, limits: Limits, metrics: Metrics, *, concurrent: int):
        """Serve with this engine, which runs so many completions at once."""
        self.limits, self.metrics = limits, metrics
        self.capacity = concurrent + limits.queue
        self.stats = engine.stats()
        self.draining = False
        self.death: BaseException | None = None
        self._jobs: dict[str, Job] = {}  # by id of the request to the engine
        self._open = 0  # completions accepted and not ended
        self._ids = itertools.count()
        self._seconds = 1.0  # that a job takes, averaged
        self._idle = asyncio.Event()
        self._idle.set()
        self._thread = EngineThread(engine, self._step_from_engine, self._refusal_from_engine, self._death_from_engine)
        metrics.watch(self)

    async def __aenter__(self) -> "Bridge":
        """Start the engine's thread."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        """End it; who still waits is told."""
        self._end_all(UnavailableError("The server is stopping."), "drain")
        if not await asyncio.to_thread(self._thread.stop, self.limits.drain_seconds):
            logger.error("the engine's step did not end in %g s; leaving it", self.limits.drain_seconds)

    def healthy(self) -> bool:
        """Whether the engine lives and moves."""
        return self.death is None and self._thread.step_seconds() < self.limits.stall_seconds

    def ready(self) -> bool:
        """Whether a request would be accepted."""
        return self.healthy() and not self.draining and self._open < self.capacity

    def submit(self, prompts: Sequence[Prompt]) -> Job:
        """Accept a job, which must be given back by `close` however it ended.

        Raises:
            ApiError: if it is refused; nothing of it is left.

        """
        job = Job(prompts, [f"{next(self._ids)}" for _ in prompts])
        self._admit(job.completions)
        self._jobs |= dict.fromkeys(job.request_ids, job)
        self._open += job.completions
        self._idle.clear()
        self.metrics.accepted.inc()
        job.timers = [
            self._loop.call_later(self.limits.queue_seconds, self._out_of_time, job, "queue_timeout"),
            self._loop.call_later(self.limits.total_seconds, self._out_of_time, job, "total_timeout"),
        ]
        self._thread.add(dict(zip(job.request_ids, prompts, strict=True)), job.arrived)
        return job

    def _admit(self, completions: int) -> None:
        if self.death is not None:
            raise RefusedError("The engine is dead; restart the server.", code="engine_dead")
        if self.draining:
            raise RefusedError("The server is stopping.", code="draining", retry_after=1)
        if completions > self.capacity:
            message = f"{completions} completions: expected at most {self.capacity}, all that may wait here."
            raise BadRequestError(message, code="too_many_completions")
        if self._open + completions > self.capacity:
            message = f"{self._open} completions are running or waiting, {self.capacity} may; try again later."
            raise OverloadedError(message, retry_after=self._wait_seconds())

    def _wait_seconds(self) -> int:
        return max(1, min(60, math.ceil(self._seconds)))

    def close(self, job: Job) -> None:
        """Give a job back: what of it still runs is aborted, because nobody waits for it."""
        if not job.ended:
            self._abandon(job, UnavailableError("The client has gone."), "disconnect")

    def _abandon(self, job: Job, error: ApiError, reason: str) -> None:
        job.fail(error)
        for request_id in job.request_ids:
            self._thread.abort(request_id)
        self._forget(job, reason)

    def _forget(self, job: Job, outcome: str) -> None:
        for timer in job.timers:
            timer.cancel()
        for request_id in job.request_ids:
            del self._jobs[request_id]
        self._open -= job.completions
        self.metrics.ended(job, outcome)
        if not self._jobs:
            self._idle.set()

    def _out_of_time(self, job: Job, reason: str) -> None:
        if reason == "total_timeout":
            seconds = self.limits.total_seconds
            self._abandon(job, TimedOutError(f"Not done in {seconds:g} s, this server's limit."), reason)
            return
        message = f"Waited {self.limits.queue_seconds:g} s in the queue, this server's limit; try again later."
        self._abandon(job, UnavailableError(message, code=reason, retry_after=self._wait_seconds()), reason)

    def _step_from_engine(self, deltas: list[Delta], started: Sequence[str], stats: EngineStats) -> None:
        self._loop.call_soon_threadsafe(self._stepped, deltas, started, stats)

    def _refusal_from_engine(self, request_id: str, error: ApiError) -> None:
        self._loop.call_soon_threadsafe(self._refuse, request_id, error)

    def _death_from_engine(self, error: BaseException) -> None:
        self._loop.call_soon_threadsafe(self._die, error)

    def _stepped(self, deltas: list[Delta], started: Sequence[str], stats: EngineStats) -> None:
        self.stats = stats
        now = perf_counter()
        for name in started:
            if (job := self._jobs.get(name)) is not None and not job.started:
                job.started = True
                job.timers[0].cancel()
                self.metrics.queue.observe(now - job.arrived)
        for delta in deltas:
            # Deltas of jobs that were aborted meanwhile find nobody.
            if (job := self._jobs.get(delta.request_id)) is not None:
                self._deliver(job, delta, now)

    def _deliver(self, job: Job, delta: Delta, now: float) -> None:
        if delta.finish_reason in ("error", "abort"):
            message = "The engine could not go on with this request." + f" {delta.error}" * bool(delta.error)
            self._abandon(job, EngineFailedError(message), f"engine_{delta.finish_reason}")
            return
        self.metrics.delta(job, delta, now)
        job.put(delta)
        if job.ended:
            self._seconds += 0.1 * (now - job.arrived - self._seconds)
            self._forget(job, "finished")

    def _refuse(self, request_id: str, error: ApiError) -> None:
        if (job := self._jobs.get(request_id)) is not None:
            self._abandon(job, error, "refused" if error.refusal else "engine_error")

    def _die(self, error: BaseException) -> None:
        self.death = error
        self._end_all(EngineFailedError("The engine died while it served this request."), "engine_death")

    def _end_all(self, error: ApiError, reason: str) -> None:
        for job in dict.fromkeys(self._jobs.values()):
            self._abandon(job, error, reason)

    async def drain(self) -> None:
        """Accept nothing more and wait for what was accepted; what is not done in time is told so."""
        self.draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), self.limits.drain_seconds)
        except TimeoutError:
            self._end_all(UnavailableError("The server stopped before this was done.", code="stopped"), "drain")
