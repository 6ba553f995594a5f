"""Errors in the shape that OpenAI's clients read: `{"error": {"message", "type", "param", "code"}}`."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from prometheus_client import Counter
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from fullstride.errors import ConfigError
from fullstride.llm.sampling_params import ParamError
from fullstride.llm.server.unsupported_params import why_refused

# Characters of a name that the request made up.
MOST_OF_A_NAME = 64
# What pydantic calls a body that is absent, something else than an object, or that was not said to be JSON.
_NO_OBJECT = frozenset(("missing", "model_attributes_type"))
# FastAPI's 400, of JSON that Python's own reader gives up on.
UNREADABLE = "The body cannot be read: it is not UTF-8, nested too deep, or has numbers of too many digits."
# The official clients try again after 408, 409, 429 and every 5xx unless this header says otherwise.
FINAL = {"x-should-retry": "false"}


class ApiError(Exception):
    """Error response to a request.

    Attributes:
        refusal: whether the request was rejected at once; others failed later.

    """

    refusal = False
    status, kind, code = 500, "server_error", "internal_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, retry_after: int = 0):
        """Say what was received, what was expected, what to do; `retry_after` in seconds, 0 for no advice."""
        super().__init__(message)
        self.message, self.param, self.retry_after = message, param, retry_after
        self.code = code or self.code

    def body(self) -> dict[str, dict[str, str | None]]:
        """The body of the response, or of the last event of a stream."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """Header `retry-after`, if trying again makes sense."""
        return {"retry-after": str(self.retry_after)} if self.retry_after else {}

    def response(self) -> JSONResponse:
        """The whole response."""
        return JSONResponse(self.body(), self.status, self.headers())


class BadRequestError(ApiError):
    """The request cannot be served as it is, now or later."""

    refusal = True
    status, kind, code = 400, "invalid_request_error", "invalid_value"


def refusing(error: ConfigError, param: str) -> BadRequestError:
    """Turn an error of the engine's own checks into a response about a parameter, with values as JSON."""
    if not isinstance(error, ParamError):
        return BadRequestError(str(error), param=param)
    value, expected = json.dumps(error.value), error.expected.replace("None", "null")
    return BadRequestError(f"Invalid '{param}': {value}; expected {expected}.", param=param)


class UnauthorizedError(ApiError):
    """No key, or not one of this server's."""

    status, kind, code = 401, "invalid_request_error", "invalid_api_key"

    def headers(self) -> dict[str, str]:
        """Header that HTTP requires of a 401 response."""
        return {"www-authenticate": "Bearer"}


class NotFoundError(BadRequestError):
    """No such model."""

    status, code = 404, "model_not_found"


class TooLargeError(BadRequestError):
    """A body above the limit: a 413, so that proxies and clients that know nothing of OpenAI understand it, too."""

    status, code = 413, "request_too_large"


class EncodedError(BadRequestError):
    """A compressed body."""

    status, code = 415, "unsupported_encoding"


class OverloadedError(ApiError):
    """The queue is full."""

    refusal = True
    status, kind, code = 429, "rate_limit_error", "queue_full"


class UnavailableError(ApiError):
    """Temporary failure: another server, or this one later, may succeed."""

    status, kind, code = 503, "server_error", "unavailable"


class RefusedError(UnavailableError):
    """Request not accepted: the server is draining or its engine has failed."""

    refusal = True


class TimedOutError(ApiError):
    """The request took longer than this server lets any request take; trying again would, too."""

    status, kind, code = 504, "server_error", "timeout"

    def headers(self) -> dict[str, str]:
        """Header that keeps clients from retrying."""
        return FINAL


class EngineFailedError(ApiError):
    """The engine could not continue this request."""

    status, kind, code = 500, "server_error", "engine_error"


class ClientGoneError(Exception):
    """The client disconnected before the response."""


def install(app: FastAPI, refused: Counter) -> None:
    """Turn every error of the app's routes into OpenAI's format, and count rejections by code."""

    async def answered(request: Request, error: Exception) -> JSONResponse:
        match error:
            case ApiError():
                found = error
            case RequestValidationError():
                found = described(error.errors())
            case HTTPException(status_code=TooLargeError.status):
                found = TooLargeError(error.detail)
            case HTTPException(status_code=EncodedError.status):
                found = EncodedError(error.detail)
            case HTTPException(status_code=BadRequestError.status):
                found = BadRequestError(UNREADABLE, code="invalid_json")
            case HTTPException():
                return _http_error(request, error)
            case ClientGoneError():
                return JSONResponse(None, 499)  # nginx's number; nobody reads it but the log
            case _:
                found = BadRequestError(str(error))
        if found.refusal:
            refused.labels(found.code).inc()
        return found.response()

    for kind in (ApiError, ConfigError, ClientGoneError, HTTPException, RequestValidationError):
        app.exception_handler(kind)(answered)


def _http_error(request: Request, error: HTTPException) -> JSONResponse:
    message, code = {
        404: (f"Unknown request URL: {request.method} {request.url.path}.", "unknown_url"),
        405: (f"Method {request.method} is not allowed on {request.url.path}.", "method_not_supported"),
    }.get(error.status_code, (str(error.detail), "invalid_request"))
    body = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}
    return JSONResponse(body, error.status_code, error.headers)


def described(errors: Sequence[Mapping[str, Any]]) -> BadRequestError:
    """Describe pydantic's first error in OpenAI's form; no value of the request is repeated."""
    # Of a union every type has its errors: that of the type which was meant lies deeper, and is not about types.
    same = [error for error in errors if error["loc"][:2] == errors[0]["loc"][:2]]
    first = min(same, key=lambda error: (error["type"].endswith("_type"), -len(error["loc"])))
    path = _path(first["loc"])
    if first["type"] == "extra_forbidden":
        name = str(first["loc"][-1])[:MOST_OF_A_NAME]
        message, code = why_refused(param := ".".join([*_path(first["loc"][:-1]), name]), name)
        return BadRequestError(message, param=param, code=code)
    param = ".".join(path) or None
    if first["type"] == "json_invalid":
        return BadRequestError("The body is not valid JSON; send a JSON object.", code="invalid_json")
    code = {"missing": "missing_required_parameter"}.get(first["type"], "invalid_type_or_value")
    if not param and first["type"] in _NO_OBJECT:
        message = "The body is not a JSON object; send one, with the header 'content-type: application/json'."
        return BadRequestError(message, code=code)
    where = f"Invalid '{param}': " if param else "Invalid body: "
    return BadRequestError(where + str(first["msg"]).removeprefix("Value error, "), param=param, code=code)


# What pydantic puts into a path besides keys and indices: the types of a union that it tried, and discriminators.
_TYPES = frozenset(("str", "int", "constrained-str", "NamedTool", "NamedFunction", "AllowedTools", "AllowedFunctions"))
_TAGS: dict[str, tuple[str, ...]] = {
    "messages": ("system", "developer", "user", "assistant", "tool"),
    "prompt": ("text", "texts", "tokens", "lists"),
    "response_format": ("text", "json_object", "json_schema"),
    "format": ("text", "json_object", "json_schema"),
    "input": ("message", "function_call", "function_call_output", "reasoning"),
}


def _path(loc: Sequence[str | int]) -> list[str]:
    """Return the path of a parameter, with keys and indices only."""
    path: list[str] = []
    tags: tuple[str, ...] = ()
    for part in map(str, loc[1:]):
        if part in tags:
            tags = ()
        elif part not in _TYPES and "[" not in part:
            path.append(part[:MOST_OF_A_NAME])
            tags = _TAGS.get(part, tags if part.isdigit() else ())
    return path
