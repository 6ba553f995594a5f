"""Between the requests of an event loop and the engines' threads: admission, deadlines, one end for every request."""

import asyncio
import itertools
import logging
import math
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any

from fullstride.llm.outputs import Delta, EngineStats
from fullstride.llm.server.errors import (
    ApiError,
    BadRequestError,
    EngineFailedError,
    OverloadedError,
    RefusedError,
    TimedOutError,
    UnavailableError,
)
from fullstride.llm.server.job import EngineJob, EnginePrompt
from fullstride.llm.server.limits import ServerLimits
from fullstride.llm.server.metrics import Metrics
from fullstride.llm.server.replicas import Replica, Router, SteppingEngine, total

logger = logging.getLogger("fullstride.llm.server")


class RequestManager:
    """Lives on one event loop; only the hand-over `_from_engine` comes from the engines' threads.

    A job is accepted or refused at once. An accepted one ends in exactly one way: all of its completions finish, it
    fails with one error, or nobody waits for it any more and it is aborted.
    """

    def __init__(
        self,
        engines: SteppingEngine | Sequence[SteppingEngine],
        limits: ServerLimits,
        metrics: Metrics,
        *,
        concurrent: int,
    ):
        """Serve with this engine, or these, each of which runs so many completions at once."""
        self.limits, self.metrics, self._concurrent = limits, metrics, concurrent
        listeners = [partial(self._from_engine, heard) for heard in (self._stepped, self._refuse, self._die)]
        several = engines if isinstance(engines, Sequence) else (engines,)
        self.replicas = tuple(Replica(i, engine, *listeners) for i, engine in enumerate(several))
        self._router = Router(self.replicas, concurrent, limits.stall_seconds)
        self._placed: dict[str, tuple[Replica, list[bytes], int]] = {}  # by id: where, known as what, completions
        self.draining = False
        self._jobs: dict[str, EngineJob] = {}  # by id of the request to the engine
        self._open = 0  # completions accepted and not ended
        self._ids = itertools.count()
        self._seconds = 1.0  # that a job takes, averaged
        self._idle = asyncio.Event()
        self._idle.set()
        metrics.watch(self)

    async def __aenter__(self) -> "RequestManager":
        """Start the engines' threads."""
        self._loop = asyncio.get_running_loop()
        for replica in self.replicas:
            replica.thread.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        """Stop the engines; requests that still wait get an error."""
        self._end_all(UnavailableError("The server is stopping."), "drain")
        stops = [asyncio.to_thread(replica.thread.stop, self.limits.drain_seconds) for replica in self.replicas]
        if not all(await asyncio.gather(*stops)):
            logger.error("the engine's step did not end within %g s; exiting without it", self.limits.drain_seconds)

    @property
    def stats(self) -> EngineStats:
        """Statistics of all engines together."""
        return total(self.replicas)

    @property
    def death(self) -> BaseException | None:
        """Reason why nothing can be served any more; None while an engine is alive."""
        deaths = [replica.death for replica in self.replicas]
        return None if None in deaths else deaths[0]

    @property
    def capacity(self) -> int:
        """Number of completions that may run or wait."""
        return self._concurrent * sum(replica.death is None for replica in self.replicas) + self.limits.queue

    def up(self) -> list[bool]:
        """Return for each engine whether it is alive and not stuck in a step."""
        return [replica.up(self.limits.stall_seconds) for replica in self.replicas]

    def healthy(self) -> bool:
        """Return whether at least one engine is alive and not stuck in a step."""
        return any(self.up())

    def ready(self) -> bool:
        """Return whether a new request would be accepted."""
        return self.healthy() and not self.draining and self._open < self.capacity

    def submit(self, prompts: Sequence[EnginePrompt]) -> EngineJob:
        """Accept a job, which must be given back by `close` however it ended.

        Raises:
            ApiError: if it is refused; nothing of it is left.

        """
        job = EngineJob(prompts, [f"{next(self._ids)}" for _ in prompts])
        self._admit(job.completions)
        self._jobs |= dict.fromkeys(job.request_ids, job)
        self._open += job.completions
        self._idle.clear()
        self.metrics.accepted.inc()
        job.timers = [
            self._loop.call_later(self.limits.queue_seconds, self._out_of_time, job, "queue_timeout"),
            self._loop.call_later(self.limits.total_seconds, self._out_of_time, job, "total_timeout"),
        ]
        self._place(job)
        return job

    def _place(self, job: EngineJob) -> None:
        """Give each prompt to an engine; if one is rejected, all are taken back."""
        parts: dict[Replica, dict[str, EnginePrompt]] = {}
        for request_id, prompt in zip(job.request_ids, job.prompts, strict=True):
            names = self._router.names(prompt)
            replica = self._router.choose(names)
            replica.enter(names, prompt.params.n)
            self._placed[request_id] = replica, names, prompt.params.n
            parts.setdefault(replica, {})[request_id] = prompt
        for replica, requests in parts.items():
            replica.thread.add(requests, job.arrived)

    def _admit(self, completions: int) -> None:
        if self.death is not None:
            raise RefusedError("The engine has failed; restart the server.", code="engine_dead")
        if self.draining:
            raise RefusedError("The server is stopping.", code="draining", retry_after=1)
        if completions > self.capacity:
            message = f"{completions} completions: expected at most {self.capacity}, this server's capacity."
            raise BadRequestError(message, param="n", code="too_many_completions")
        if self._open + completions > self.capacity:
            message = f"{self._open} completions are running or waiting, at most {self.capacity} may; try again later."
            raise OverloadedError(message, retry_after=self._wait_seconds())

    def _wait_seconds(self) -> int:
        return max(1, min(60, math.ceil(self._seconds)))

    def close(self, job: EngineJob) -> None:
        """Close a job: completions that still run are aborted, since no client waits for them."""
        if not job.ended:
            self._abandon(job, UnavailableError("The client disconnected."), "disconnect")

    def _abandon(self, job: EngineJob, error: ApiError, reason: str) -> None:
        job.fail(error)
        for request_id in job.request_ids:
            self._placed[request_id][0].thread.abort(request_id)
        self._forget(job, reason)

    def _forget(self, job: EngineJob, outcome: str) -> None:
        for timer in job.timers:
            timer.cancel()
        for request_id in job.request_ids:
            del self._jobs[request_id]
            replica, names, completions = self._placed.pop(request_id)
            replica.leave(names, completions)
        self._open -= job.completions
        self.metrics.ended(job, outcome)
        if not self._jobs:
            self._idle.set()

    def _out_of_time(self, job: EngineJob, reason: str) -> None:
        if reason == "total_timeout":
            seconds = self.limits.total_seconds
            self._abandon(job, TimedOutError(f"Not finished within {seconds:g} s, this server's limit."), reason)
            return
        message = f"Waited {self.limits.queue_seconds:g} s in the queue, this server's limit; try again later."
        self._abandon(job, UnavailableError(message, code=reason, retry_after=self._wait_seconds()), reason)

    def _from_engine(self, heard: Callable[..., None], *news: Any) -> None:
        self._loop.call_soon_threadsafe(heard, *news)

    def _stepped(
        self, replica: Replica, deltas: list[Delta], started: Sequence[str], stats: EngineStats, began: float
    ) -> None:
        replica.stats = stats
        now = perf_counter()
        for name in started:
            if (job := self._jobs.get(name)) is not None and not job.started:
                job.started, job.began = True, began
                job.timers[0].cancel()
                self.metrics.queue.observe(began - job.arrived)
        for delta in deltas:
            # Deltas of jobs that were aborted meanwhile find nobody.
            if (job := self._jobs.get(delta.request_id)) is not None:
                self._deliver(job, delta, now)

    def _deliver(self, job: EngineJob, delta: Delta, now: float) -> None:
        if delta.refused:
            self._abandon(job, BadRequestError(delta.error, code=delta.refused), "refused")
            return
        if delta.finish_reason in ("error", "abort"):
            message = "The engine could not continue this request." + f" {delta.error}" * bool(delta.error)
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

    def _die(self, replica: Replica, error: BaseException) -> None:
        replica.death = error
        if len(self.replicas) > 1:
            logger.critical("engine %d of %d has failed: %s", replica.number, len(self.replicas), error)
        lost = [self._jobs[request_id] for request_id, (owner, *_) in self._placed.items() if owner is replica]
        for job in dict.fromkeys(lost):
            self._abandon(job, EngineFailedError("The engine failed during this request."), "engine_death")

    def _end_all(self, error: ApiError, reason: str) -> None:
        for job in dict.fromkeys(self._jobs.values()):
            self._abandon(job, error, reason)

    async def drain(self) -> None:
        """Accept nothing more and wait for accepted requests; those not finished in time get an error."""
        self.draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), self.limits.drain_seconds)
        except TimeoutError:
            self._end_all(
                UnavailableError("The server stopped before this request was finished.", code="stopped"), "drain"
            )
