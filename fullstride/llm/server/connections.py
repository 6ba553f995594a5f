"""Limits of a connection until it has sent a request: header bytes, header and body time, and their number.

uvicorn bounds the header's bytes (by h11 alone; httptools collects headers without end), the time between requests, and
requests at once; neither connections nor the time in which a request comes.
"""

import asyncio
import logging
import resource
import sys
from typing import Any

import h11
from starlette.responses import JSONResponse
from uvicorn.protocols.http.h11_impl import H11Protocol

from fullstride.llm.server.errors import ApiError, BadRequestError, UnavailableError

logger = logging.getLogger("fullstride.llm.server")
HEADER_BYTES = 65_536

# Open files in addition to the connections: weights, devices, processes.
OTHER_FILES = 256


class HeaderError(BadRequestError):
    """Error of a header that is too long."""

    status, code = 431, "header_too_large"


class SlowError(BadRequestError):
    """Error of a request that is not complete in time."""

    status, code = 408, "request_timeout"


class BoundedProtocol(H11Protocol):
    """uvicorn's protocol by h11; a class of it has the limits: seconds of a header and a body, and most connections."""

    header_seconds: float
    body_seconds: float
    most: int
    _timer: asyncio.TimerHandle | None = None
    _waits_for: Any = None

    def connection_made(self, transport: Any) -> None:  # type: ignore[override]
        """Accept the connection, unless there are too many."""
        super().connection_made(transport)
        if len(self.connections) > self.most:
            self._refuse(
                UnavailableError("Too many connections; try again later.", code="too_many_connections", retry_after=1)
            )
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Process received bytes."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """Wait for the next request, or for the rest of one that was answered before it had come."""
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        super().connection_lost(exc)
        self._stop()

    def send_400_response(self, msg: str) -> None:
        """Answer 400 to invalid HTTP; h11's message says what is wrong."""
        error = sys.exception()
        if isinstance(error, h11.RemoteProtocolError) and error.error_status_hint == HeaderError.status:
            self._refuse(HeaderError(f"The header has more than {HEADER_BYTES} bytes, this server's limit."))
        else:
            self._refuse(BadRequestError("The request is not valid HTTP/1.1.", code="invalid_http"))

    def _watch(self) -> None:
        """Start the timer of the header or the body, once for each."""
        state = self.conn.their_state
        comes = self.timeout_keep_alive_task is None and state in (h11.IDLE, h11.SEND_BODY)
        waits_for = (state, id(self.cycle)) if comes and not self.transport.is_closing() else None
        if waits_for == self._waits_for:
            return
        self._stop()
        self._waits_for = waits_for
        if waits_for is not None:
            seconds = self.header_seconds if state is h11.IDLE else self.body_seconds
            self._timer = self.loop.call_later(seconds, self._late, seconds)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self, seconds: float) -> None:
        self._refuse(SlowError(f"The request was not complete within {seconds:g} s, this server's limit."))
        if self.cycle is not None:
            # Whoever reads the body is told that its client has gone.
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def _refuse(self, error: ApiError) -> None:
        """Send the error, if no response has begun, and close the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            response = JSONResponse(error.body(), error.status, {**error.headers(), "connection": "close"})
            events = (
                h11.Response(status_code=error.status, headers=response.raw_headers),
                h11.Data(data=bytes(response.body)),
                h11.EndOfMessage(),
            )
            self.transport.write(b"".join(filter(None, map(self.conn.send, events))))
        self._stop()
        self.transport.close()


def make_room(connections: int) -> None:
    """Raise this process's limit of open files for `connections`, as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        if most < wanted:
            logger.warning(
                "%d files may be open, but %d are needed for %d connections; raise ulimit -n", most, wanted, connections
            )
