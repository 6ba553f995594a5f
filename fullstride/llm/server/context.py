"""Context that all routes share."""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import time
from typing import Any, ClassVar, Protocol, runtime_checkable
from uuid import uuid4

import anyio
import anyio.to_thread
from starlette.requests import Request
from starlette.responses import Response

from fullstride.errors import ConfigError
from fullstride.llm.outputs import Delta
from fullstride.llm.sampling_params import Structured
from fullstride.llm.server.job import EngineJob, EnginePrompt
from fullstride.llm.server.limits import ServerLimits
from fullstride.llm.server.metrics import Metrics
from fullstride.llm.server.middleware import API_KEY
from fullstride.llm.server.request_manager import RequestManager
from fullstride.llm.server.schemas.base import SamplingRequest, StreamOptions
from fullstride.llm.server.served_model import ServedModel
from fullstride.llm.server.streaming import EventStream, event, json_response, merge, while_connected
from fullstride.llm.server.tools.conformance import CallSchemas, Check, check_of, refused
from fullstride.llm.server.tools.shapes import SchemaCompiler, schema_of
from fullstride.llm.server.turns import Turns


@dataclass
class ServerState:
    """State of a server: a model and its engines.

    Attributes:
        served: the model.
        bridge: to its engines.
        limits: of requests.
        metrics: of all that happens.
        shapes: compiles what texts are to be like; None if the engine has to.
        reading: long bodies, one at a time: two would be read no sooner, since reading holds Python's lock for most of
            its time, and all others would wait for both.
        checking: texts against schemas, one at a time: threads that wait must not be those that encode prompts.

    """

    served: ServedModel
    bridge: RequestManager
    limits: ServerLimits
    metrics: Metrics
    shapes: SchemaCompiler | None = None
    reading: anyio.CapacityLimiter = field(default_factory=lambda: anyio.CapacityLimiter(1))
    checking: Turns = field(default_factory=lambda: Turns(1))

    async def compile(
        self,
        request: Request,
        param: str,
        shape: Structured | None,
        constraint: Structured | None,
        calls: CallSchemas | None = None,
    ) -> Check | None:
        """Compile the grammar of a request, if it has one, off the event loop and off the engine's thread.

        Args:
            request: is waited for, and no longer than its client waits.
            param: that asks for the shape.
            shape: of a text without calls.
            constraint: of all texts: the shape, or one with calls.
            calls: that the text may have.

        Returns:
            What has to be checked when a text is whole, if a grammar does not hold all of its schema.

        Raises:
            BadRequestError: if what this parameter asks for is not understood, or costs too much.
            UnavailableError: if others' shapes took too long.
            ClientGoneError: if the client did not wait.

        """
        if constraint is None and calls is None:
            return None
        try:
            if constraint is not None and self.shapes is not None:
                await while_connected(request, self.shapes.compile(constraint))
            async with self.checking:
                return await anyio.to_thread.run_sync(check_of, shape, calls, limiter=anyio.CapacityLimiter(1))
        except ConfigError as error:
            tried = self.shapes.tried if self.shapes is not None else lambda shape: None
            schemas = {"": schema_of(shape), **(calls.schemas if calls else {})}
            raise await anyio.to_thread.run_sync(refused, error, param, constraint, schemas, tried) from error


def server_of(request: Request) -> ServerState:
    """Return the state of the server that received this request."""
    return request.app.state.server


def cache_salt(request: Request, own: str | None) -> str:
    """Return the salt of a request's cached blocks: its API key's number, and its own salt."""
    key = request.scope.get(API_KEY, "")
    return f"{key}:{own or ''}" if key != "" or own else ""


@runtime_checkable
class ResponseFormat(Protocol):
    """Writer of deltas in one API's format: choices of a stream's events, and of a merged response.

    `once` are further fields of the response, or of a stream's first event.
    """

    kind: str
    chunk_kind: str

    @property
    def once(self) -> Mapping[str, Any]: ...

    def chunks(self, which: int, delta: Delta) -> list[dict[str, Any]]: ...
    def whole(self, choice: dict[str, Any]) -> dict[str, Any]: ...


@dataclass
class Responder:
    """Response to a generating request; violations found in a whole text are reported at its end."""

    server: ServerState
    body: SamplingRequest
    answer: ResponseFormat
    model: str
    prefix: str
    check: Check | None = None
    # After the last event.
    done: ClassVar[bytes] = b"data: [DONE]\n\n"
    _texts: dict[tuple[int, int], str] = field(default_factory=dict)

    async def send(self, request: Request, prompts: Sequence[EnginePrompt]) -> Response:
        """Run the prompts and respond; if the client disconnects first, its work is aborted.

        Raises:
            ApiError: if nothing, or no whole answer, came.
            ClientGoneError: if the client did not wait.

        """
        adapter = self.server.served.adapter(self.model)
        own = {"adapter": adapter, "cache_salt": cache_salt(request, self.body.cache_salt)}
        job = self.server.bridge.submit([replace(prompt, **own) for prompt in prompts])
        streamed = False
        try:
            await while_connected(request, job.begun())
            if self.body.stream:
                streamed = True
                return EventStream(self._events(job), job, self.server.bridge, self.done)
            return await while_connected(request, self._whole(job))
        finally:
            if not streamed:
                self.server.bridge.close(job)

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": f"{self.prefix}-{uuid4().hex}", "object": kind, "created": int(time()), "model": self.model}

    async def _written(self, which: int, delta: Delta) -> list[dict[str, Any]]:
        """Return the choices of a delta; those with a prompt, which may be long, are written in a thread."""
        if getattr(self.body, "echo", False) or delta.prompt_logprobs is not None:
            choices = await anyio.to_thread.run_sync(self.answer.chunks, which, delta)
        else:
            choices = self.answer.chunks(which, delta)
        if self.check is None:
            return choices
        text = self._texts[which, delta.index] = self._texts.get((which, delta.index), "") + delta.text
        if delta.finish_reason is not None:
            whole = choices[-1]["finish_reason"] != "length"
            async with self.server.checking:
                alone = anyio.CapacityLimiter(1)
                errors = await anyio.to_thread.run_sync(self.check, text, whole, limiter=alone)
            if errors:
                choices[-1]["schema_errors"] = errors
        return choices

    async def _whole(self, job: EngineJob) -> Response:
        merged: dict[int, dict[str, Any]] = {}
        async for which, delta in job:
            for choice in await self._written(which, delta):
                merged[choice["index"]] = merge(merged.get(choice["index"]), choice)
        choices = [self.answer.whole(merged[index]) for index in sorted(merged)]
        whole = {**self._head(self.answer.kind), "choices": choices, "usage": self._usage(job), **self.answer.once}
        return await anyio.to_thread.run_sync(json_response, whole)

    async def _events(self, job: EngineJob) -> AsyncIterator[bytes]:
        head = self._head(self.answer.chunk_kind)
        options = self.body.stream_options or StreamOptions()
        counts: dict[str, Any] = {"usage": None} if options.include_usage else {}
        once = self.answer.once
        async for which, delta in job:
            if options.continuous_usage_stats:
                counts = {"usage": self._usage(job)}
            for choice in await self._written(which, delta):
                yield event({**head, "choices": [choice], **counts, **once})
                once = {}
        if options.include_usage:
            yield event({**head, "choices": [], "usage": self._usage(job)})

    def _usage(self, job: EngineJob) -> dict[str, Any]:
        # Where none are asked for, the engine's one token is in no answer.
        generated = 0 if self.body.no_tokens else job.generated_tokens
        return {
            "prompt_tokens": job.prompt_tokens,
            "completion_tokens": generated,
            "total_tokens": job.prompt_tokens + generated,
            "prompt_tokens_details": {"cached_tokens": job.cached_tokens},
        }
