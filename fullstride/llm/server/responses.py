"""JSON written by pydantic's Rust core, and how errors look in /openapi.json."""

from typing import Any

from pydantic import BaseModel
from pydantic_core import to_json
from starlette.responses import Response


class ErrorDetail(BaseModel):
    """What went wrong."""

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
STREAM = {"description": "The answer; with `stream`, its pieces as server-sent events.", "content": {}}
STREAM["content"] = {"text/event-stream": {}}  # without a schema: it would be taken for that of an event
GENERATING[200] = STREAM


def json_response(body: Any, status: int = 200) -> Response:
    """A response of plain values."""
    return Response(to_json(body), status, media_type="application/json")
