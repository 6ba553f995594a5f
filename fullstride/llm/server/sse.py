"""Server-sent events of a job: its status waits for the first token, and its end gives the job back."""

import logging
from collections.abc import AsyncIterator, Mapping
from typing import Any

from pydantic_core import to_json
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from fullstride.llm.server.errors import ApiError, EngineFailedError
from fullstride.llm.server.job import Job
from fullstride.llm.server.request_manager import Bridge

logger = logging.getLogger("fullstride.llm.server")
DONE = b"data: [DONE]\n\n"
# Line breaks to Unicode, and so to many clients, but neither to JSON nor to the events' own format.
BREAKS = {char.encode(): f"\\u{ord(char):04x}".encode() for char in "\u0085\u2028\u2029"}


def event(body: Mapping[str, Any]) -> bytes:
    """One event, in one line whoever splits it."""
    written = to_json(body)
    for raw, escaped in BREAKS.items():
        written = written.replace(raw, escaped)
    return b"data: " + written + b"\n\n"


class EventStream(StreamingResponse):
    """Sends the events, then `[DONE]`; a job that fails midway ends in an event with the error instead.

    The job is given back when the response ends, whichever way: a generator that waits to be collected would keep the
    engine busy for a client that has gone.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], job: Job, bridge: Bridge):
        """Stream the events of a job."""
        # Proxies such as nginx would otherwise collect events before they pass them on.
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(_ended(events), headers=headers)
        self._job, self._bridge = job, bridge

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it all."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._bridge.close(self._job)


async def _ended(events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    try:
        async for each in events:
            yield each
        yield DONE
    except ApiError as error:
        yield event(error.body())
    except Exception:
        logger.exception("a response could not be written")
        yield event(EngineFailedError("The server could not write this response.", code="internal_error").body())
