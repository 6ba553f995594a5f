"""FastAPI application of a server."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from starlette.middleware import Middleware

from fullstride import __version__
from fullstride.llm.server import chat, completions, embeddings, errors, routes
from fullstride.llm.server.context import ServerState
from fullstride.llm.server.limits import ServerLimits
from fullstride.llm.server.metrics import Metrics
from fullstride.llm.server.middleware import OPEN_PATHS, ApiKeys, BodyLimit, KnownHosts, RequestLog, check_keys
from fullstride.llm.server.replicas import SteppingEngine
from fullstride.llm.server.request_manager import RequestManager
from fullstride.llm.server.responses import route as responses
from fullstride.llm.server.served_model import ServedModel
from fullstride.llm.server.tools.shapes import SchemaCompiler
from fullstride.llm.text.grammar import Compiler


def create_app(
    engine: SteppingEngine | Sequence[SteppingEngine],
    served: ServedModel,
    *,
    concurrent: int,
    limits: ServerLimits | None = None,
    api_keys: Sequence[str] = (),
    grammars: Compiler | None = None,
    hosts: Sequence[str] = ("*",),
) -> FastAPI:
    """Build an ASGI application; the engines' threads run during its lifespan.

    Args:
        engine: `fullstride.llm.engine.Engine`, or several of the same model; no other code may use them meanwhile.
        served: the model's names, tokenizer and longest sequence.
        concurrent: completions that an engine runs at once; `limits.queue` more may wait.
        limits: limits of requests.
        api_keys: any of which opens every route but /health and /ready, which are open; none opens all of them.
        grammars: the engine's, for the shapes of structured output to be compiled beside its steps.
        hosts: names that requests may use for this server; `*.example.com` matches all subdomains, `*` any name.

    Raises:
        ConfigError: for a key that is none.

    """
    check_keys(api_keys)
    limits = limits or ServerLimits()
    metrics = Metrics(served.names[0])
    bridge = RequestManager(engine, limits, metrics, concurrent=concurrent)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with bridge:
            yield

    app = FastAPI(
        title="fullstride",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,  # its scripts come from elsewhere
        redoc_url=None,
        redirect_slashes=False,  # to http, also from behind a proxy's https: clients would send prompts on in the clear
        middleware=[
            Middleware(RequestLog, metrics=metrics),
            Middleware(KnownHosts, names=hosts, refused=metrics.refused),
            Middleware(ApiKeys, keys=api_keys),
            Middleware(BodyLimit, most=limits.body_bytes),
        ],
    )
    shapes = SchemaCompiler(grammars, limits.queue_seconds) if grammars is not None else None
    app.state.server = ServerState(served, bridge, limits, metrics, shapes)
    errors.install(app, metrics.refused)
    for module in (chat, completions, responses, embeddings, routes):
        app.include_router(module.router)
    _describe(app, guarded=bool(api_keys))
    return app


def _describe(app: FastAPI, guarded: bool) -> None:
    """Let /openapi.json say what FastAPI does not know: validation errors are 400s, and some routes need a key."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is not None:
            return app.openapi_schema
        schema = generate()  # which FastAPI keeps
        for name in ("HTTPValidationError", "ValidationError"):
            schema["components"]["schemas"].pop(name, None)
        if guarded:
            schema["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        for path, methods in schema["paths"].items():
            for operation in methods.values():
                operation["responses"].pop("422", None)
                if guarded and path not in OPEN_PATHS:
                    operation["security"] = [{"key": []}]
        return schema

    app.openapi = openapi
