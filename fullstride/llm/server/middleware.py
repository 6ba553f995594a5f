"""Around every route, as plain ASGI so that streams and disconnects pass through: names, keys, size and the log."""

import hmac
import logging
import re
from collections.abc import Sequence
from time import perf_counter
from uuid import uuid4

from prometheus_client import Counter
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fullstride.errors import ConfigError
from fullstride.llm.server.errors import ApiError, BadRequestError, EncodedError, TooLargeError, UnauthorizedError
from fullstride.llm.server.metrics import Metrics
from fullstride.llm.server.turns import CLIENT

logger = logging.getLogger("fullstride.llm.server")
# Who asks for them is a probe, which has no key.
OPEN_PATHS = frozenset(("/health", "/ready"))
# Of a request's scope: the number of its API key, whose cached prompts are its own.
API_KEY = "fullstride.api_key"
# What a client may choose as its request's id: nothing that could break a log's line or a header.
REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
# A name, or an IPv6 address in its brackets, before the port.
HOST = re.compile(r"(\[[^\]]*\]|[^:]*)(?::\d*)?")


class KnownHosts:
    """Middleware that answers 400 to a request whose Host header does not name this server."""

    def __init__(self, app: ASGIApp, names: Sequence[str], refused: Counter):
        """Accept these names, `*.example.com` for all subdomains and `*` for any; count rejected requests."""
        self._app, self._refused = app, refused
        self._names = [name.lower() for name in names]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on requests that name this server."""
        found = HOST.fullmatch(Headers(scope=scope).get("host", "").lower()) if scope["type"] == "http" else None
        host = found[1] if found else ""
        known = any(host == name or (name[:1] == "*" and host.endswith(name[1:])) for name in self._names)
        if scope["type"] != "http" or known:
            await self._app(scope, receive, send)
            return
        message = f"The Host header does not name this server; expected one of {', '.join(self._names)}."
        error = BadRequestError(message, code="unknown_host")
        self._refused.labels(error.code).inc()
        await error.response()(scope, receive, send)


def check_keys(keys: Sequence[str]) -> None:
    """See that each key is one: an empty one, such as a variable that is not set, would let everybody in.

    Raises:
        ConfigError: for a key that is empty, or has spaces, which no client could send.

    """
    for number, key in enumerate(keys, 1):
        if not key or any(map(str.isspace, key)):
            what = "has spaces" if key else "is empty"
            raise ConfigError(
                f"API key {number} {what}: expected visible characters; omit all keys to let every client in"
            )


class ApiKeys:
    """Lets a request with one of the keys through; compares with all of them, in constant time."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]):
        """Guard the app; without keys it is open."""
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, or answer 401."""
        fits = self._fits(Headers(scope=scope)) if scope["type"] == "http" else []
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or not self._keys or any(fits):
            if any(fits):
                scope[API_KEY] = number = fits.index(True)
                if len(self._keys) > 1:  # one that all have tells nobody apart
                    CLIENT.set(f"key {number}")
            await self._app(scope, receive, send)
            return
        message = "No valid API key: send one of this server's as 'Authorization: Bearer KEY'."
        await UnauthorizedError(message).response()(scope, receive, send)

    def _fits(self, headers: Headers) -> list[bool]:
        """Return for each key whether the request has it."""
        # Starlette reads headers as latin-1, which keeps their bytes.
        scheme, _, given = headers.get("authorization", "").partition(" ")
        bearer = scheme.lower() == "bearer"
        return [hmac.compare_digest(given.strip().encode("latin-1"), key) and bearer for key in self._keys]


class BodyLimit:
    """Answers 413 to a body above the limit, before it is read if it says its length, and never later than that.

    A compressed one is answered with 415: what it may grow to is not known before.
    """

    def __init__(self, app: ASGIApp, most: int):
        """Limit bodies to this many bytes."""
        self._app, self._most = app, most
        self._message = f"The body has more than {most} bytes, this server's limit."

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on bodies within the limit."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        length, encoding = headers.get("content-length", "0"), headers.get("content-encoding", "identity")
        said, seen = int(length) if length.isdigit() else 0, 0

        async def counted() -> Message:
            nonlocal seen
            if encoding.strip().lower() not in ("", "identity"):
                told = f"The body has the encoding {encoding[:64]!r}; send it unencoded, without Content-Encoding."
                raise HTTPException(EncodedError.status, told)
            message = {} if said > self._most else await receive()
            seen += len(message.get("body", b""))
            if max(said, seen) > self._most:
                raise HTTPException(TooLargeError.status, self._message)  # FastAPI takes others for bad JSON
            return message

        await self._app(scope, counted, send)


class RequestLog:
    """Gives every request an id, counts and logs its answer: never what was asked or said."""

    def __init__(self, app: ASGIApp, metrics: Metrics):
        """Count with these metrics."""
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on; an unhandled error becomes a 500 in the standard format."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        CLIENT.set((scope.get("client") or ("",))[0])
        wished = Headers(scope=scope).get("x-request-id", "")
        request_id = wished if REQUEST_ID.fullmatch(wished) else uuid4().hex
        began, status = perf_counter(), 0

        async def with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, with_id)
        except Exception:
            logger.exception("request %s failed", request_id)
            if status == 0:
                await ApiError("The server failed; see its log.").response()(scope, receive, with_id)
        finally:
            # The route's pattern, not the path: a path can be anything, and would make a series of its own.
            route, status = getattr(scope.get("route"), "path", "unknown"), status or 499
            self._metrics.responses.labels(route, str(status)).inc()
            logger.info("%s %s %s %d %.3fs", request_id, scope["method"], route, status, perf_counter() - began)
