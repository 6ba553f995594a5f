"""The routes around the generating ones: models, tokens, health, metrics."""

from collections.abc import Callable
from typing import Any

import anyio.to_thread
from fastapi import APIRouter, Request
from starlette.responses import Response

from fullstride.llm.server.bodies import OffLoopRoute
from fullstride.llm.server.context import ServerState, server_of
from fullstride.llm.server.errors import UnavailableError
from fullstride.llm.server.messages import chat_prompt
from fullstride.llm.server.sampling import at_most
from fullstride.llm.server.schemas.routes import (
    Detokenized,
    DetokenizeRequest,
    Model,
    Models,
    Status,
    Tokenized,
    TokenizeRequest,
)
from fullstride.llm.server.streaming import errors, json_response

router = APIRouter(route_class=OffLoopRoute)
Endpoint = Callable[..., Any]


def _get(path: str, responses: dict[int | str, dict[str, Any]]) -> Callable[[Endpoint], Endpoint]:
    """A GET route that answers HEAD, too, as some probes ask; the server leaves the body out."""

    def add(endpoint: Endpoint) -> Endpoint:
        # First, and with both: who sends another method is told what the first route of a path takes.
        router.api_route(path, methods=["GET", "HEAD"], include_in_schema=False)(endpoint)
        return router.get(path, responses=responses)(endpoint)

    return add


@_get("/v1/models", errors())
async def models(request: Request) -> Models:
    """List the names that a request may give as `model`."""
    served = server_of(request).served
    return Models(object="list", data=[_model(request, name) for name in (*served.names, *served.adapters)])


router.api_route("/v1/models/", methods=["GET", "HEAD"], include_in_schema=False)(models)


@_get("/v1/models/{model:path}", errors(404))
async def one_model(model: str, request: Request) -> Model:
    """Show one of them."""
    return _model(request, server_of(request).served.name(model))


def _model(request: Request, name: str) -> Model:
    served = server_of(request).served
    return Model(
        id=name,
        object="model",
        created=served.created,
        owned_by="fullstride",
        root=name if served.adapter(name) else served.names[0],
        parent=served.names[0] if served.adapter(name) else None,
        max_model_len=served.max_length,
    )


@router.post("/tokenize", response_model=Tokenized, responses=errors(400, 404, 413, 415))
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """Show the tokens of a text, however long, or of a chat as the model's template writes it."""
    server = server_of(request)
    server.served.name(body.model)
    return await anyio.to_thread.run_sync(_tokenized, body, server)


def _tokenized(body: TokenizeRequest, server: ServerState) -> Response:
    tokenizer, special = server.served.tokenizer, body.add_special_tokens
    if body.prompt is not None:
        ids = tokenizer.encode(body.prompt, special is not False)
    else:
        at_most("tools", len(body.tools or ()), server.limits.tools, " tools")
        rendered = chat_prompt(body, server.served, server.limits, body.tools or ())
        ids = server.served.special.encode(rendered, bool(special))
    texts = [tokenizer.token_bytes(token).decode(errors="replace") for token in ids] if body.return_token_strs else None
    counts = {"count": len(ids), "max_model_len": server.served.max_length, "tokens": ids}
    return json_response({**counts, "token_strs": texts})


@router.post("/detokenize", response_model=Detokenized, responses=errors(400, 404, 413, 415))
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """Show the text of tokens, special ones included."""
    served = server_of(request).served
    served.name(body.model)

    def detokenized() -> Response:
        return json_response({"prompt": served.tokenizer.decode(served.known(body.tokens, "tokens"), False)})

    return await anyio.to_thread.run_sync(detokenized)


@_get("/health", errors(503))
async def health(request: Request) -> Status:
    """Answer 200 while an engine lives and its step is not stuck, `degraded` if not all do; needs no key."""
    bridge = server_of(request).bridge
    if not bridge.healthy():
        state = "is dead" if bridge.death is not None else "is stuck in a step"
        raise UnavailableError(f"The engine {state}; restart the server.", code="engine_dead")
    return Status(status="ok" if all(bridge.up()) else "degraded")


@_get("/ready", errors(503))
async def ready(request: Request) -> Status:
    """Answer 200 while a request would be accepted; needs no key."""
    if not server_of(request).bridge.ready():
        raise UnavailableError("The server is stopping, full, or failed.", code="not_ready", retry_after=1)
    return Status(status="ready")


@_get("/metrics", {200: {"content": {"text/plain": {}}, "description": "Prometheus"}, **errors()})
async def metrics(request: Request) -> Response:
    """Report to Prometheus."""
    return Response(server_of(request).metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")
