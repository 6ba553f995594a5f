"""Reading of long request bodies off the event loop, so that other requests are answered meanwhile."""

import json
from collections.abc import Callable, Coroutine
from typing import Any

import anyio.to_thread
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.responses import Response

from fullstride.llm.server.context import server_of
from fullstride.llm.server.errors import UNREADABLE, BadRequestError

# Bytes up to which a body is parsed on the event loop: starting a thread would take longer.
INLINE = 4096
# Lists, objects and keys of a body. All that the other limits let pass have a few thousand; Python makes them with its
# lock held, ten times as slowly as texts.
MOST_CONTAINERS = 1 << 16


class OffLoopRoute(APIRoute):
    """Route whose long bodies are parsed and validated in a thread; FastAPI accepts the resulting model as it is."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return FastAPI's handler, with the body already parsed."""
        handle = super().get_route_handler()

        async def read_first(request: Request) -> Response:
            model: Any = self.body_field.field_info.annotation if self.body_field else None
            kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            is_json = kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))
            if model is not None and is_json and len(body := await request.body()) > INLINE:
                request._json = await anyio.to_thread.run_sync(_read, model, body, limiter=server_of(request).reading)
            return await handle(request)

        return read_first


def _whole(text: str) -> int:
    """Read a number in Python: `json` itself holds Python's lock from the first number of a list to the last."""
    return int(text)


def _decimal(text: str) -> float:
    """Read a number with a point or an exponent, for the same reason."""
    return float(text)


def _read(model: type[BaseModel], body: bytes) -> BaseModel:
    """Parse and validate a body as FastAPI does.

    Raises:
        RequestValidationError: for a body that is not JSON, or not valid for the model.
        BadRequestError: for JSON that Python's own reader gives up on, or of too many lists, objects and keys.

    """
    try:
        text = body.decode(json.detect_encoding(body), "surrogatepass")  # as json.loads does it
        _check_containers(text)
        return model.model_validate(json.loads(text, parse_int=_whole, parse_float=_decimal))
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False, include_input=False)
        raise RequestValidationError([{**each, "loc": ("body", *each["loc"])} for each in errors]) from None
    except json.JSONDecodeError as error:
        found = {"type": "json_invalid", "loc": ("body", error.pos), "msg": "JSON decode error"}
        raise RequestValidationError([found]) from None
    except (ValueError, RecursionError):
        raise BadRequestError(UNREADABLE, code="invalid_json") from None


def _check_containers(text: str) -> None:
    """Count lists, objects and keys before any is created; brackets and colons within texts do not count."""
    if sum(map(text.count, "[{:")) <= MOST_CONTAINERS:
        return
    outside = "".join(text.replace("\\\\", "").replace('\\"', "").split('"')[::2])
    found = sum(map(outside.count, "[{:"))
    if found > MOST_CONTAINERS:
        message = f"The body has {found} lists, objects and keys; expected at most {MOST_CONTAINERS}."
        raise BadRequestError(f"{message} Split the request.", code="too_many_containers")
