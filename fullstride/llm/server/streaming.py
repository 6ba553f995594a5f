"""Responses: JSON and server-sent events, whole choices of a stream's pieces, and work that its client waits for."""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from fullstride.llm.server.errors import ApiError, ClientGoneError, EngineFailedError
from fullstride.llm.server.job import EngineJob
from fullstride.llm.server.request_manager import RequestManager

logger = logging.getLogger("fullstride.llm.server")
# Line breaks to Unicode, and so to many clients, but neither to JSON nor to the events' own format.
BREAKS = {char.encode(): f"\\u{ord(char):04x}".encode() for char in "\u0085\u2028\u2029"}
# Values that stand for themselves: the latest one counts.
_LATEST = frozenset(("index", "finish_reason", "stop_reason", "role", "refusal", "id", "type", "name"))
T = TypeVar("T")


class ErrorDetail(BaseModel):
    """Error that ended the request."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every response that is not a success."""

    error: ErrorDetail


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """These statuses, and those that any route may answer with, for a route's documentation."""
    return {status: {"model": ErrorBody} for status in sorted({401, *statuses})}


GENERATING = errors(400, 404, 413, 415, 429, 500, 503, 504)
STREAM = {"description": "Response, or with `stream` its chunks as server-sent events.", "content": {}}
STREAM["content"] = {"text/event-stream": {}}  # without a schema: it would be taken for that of an event
GENERATING[200] = STREAM


def json_response(body: Any, status: int = 200) -> Response:
    """A response of plain values."""
    return Response(to_json(body), status, media_type="application/json")


def event(body: Mapping[str, Any], name: str = "") -> bytes:
    """One event, its data in one line whoever splits it; /v1/responses names its events."""
    written = to_json(body)
    for raw, escaped in BREAKS.items():
        written = written.replace(raw, escaped)
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + written + b"\n\n"


class EventStream(StreamingResponse):
    """Sends the events, then what ends them all; a job that fails midway ends in an event with the error instead.

    The job is given back when the response ends, whichever way: a generator that waits to be collected would keep the
    engine busy for a client that has gone.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], job: EngineJob, bridge: RequestManager, done: bytes):
        """Stream the events of a job."""
        # Proxies such as nginx would otherwise collect events before they pass them on.
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(self._ended(events, done), headers=headers)
        self._job, self._bridge = job, bridge

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it all."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._bridge.close(self._job)

    @staticmethod
    async def _ended(events: AsyncIterator[bytes], done: bytes) -> AsyncIterator[bytes]:
        try:
            async for each in events:
                yield each
            yield done
        except ApiError as error:
            yield event(error.body())
        except Exception:
            logger.exception("a response could not be written")
            yield event(EngineFailedError("The server could not write this response.", code="internal_error").body())


def merge(whole: Any, piece: Any) -> Any:
    """Texts and lists are joined, dictionaries merged by key; None adds nothing. Lists are joined in place."""
    if whole is None or piece is None:
        return piece if whole is None else whole
    if isinstance(whole, dict):
        merged = dict(whole)
        for key, value in piece.items():
            latest = key in _LATEST and value is not None
            merged[key] = value if latest else merge(merged.get(key), value)
        return merged
    whole += piece
    return whole


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The work's result; the body of the request was read before.

    Raises:
        ClientGoneError: if the client went first; the work is cancelled.

    """

    async def left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            continue

    doing = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(left())
    try:
        await asyncio.wait((doing, gone), return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise ClientGoneError
        return doing.result()
    finally:
        doing.cancel()
        gone.cancel()
