"""POST /v1/embeddings."""

from base64 import b64encode
from dataclasses import replace
from typing import Any

import anyio.to_thread
import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import Response

from fullstride.llm.pooling import EMBEDDING, embedding_of
from fullstride.llm.server.bodies import OffLoopRoute
from fullstride.llm.server.context import ServerState, cache_salt, server_of
from fullstride.llm.server.job import EngineJob, EnginePrompt
from fullstride.llm.server.schemas.embeddings import EmbeddingRequest, Embeddings, embeddings_of
from fullstride.llm.server.served_model import ServedModel
from fullstride.llm.server.streaming import errors, json_response, while_connected

router = APIRouter(route_class=OffLoopRoute)


@router.post("/v1/embeddings", response_model=Embeddings, responses=errors(400, 404, 413, 415, 429, 500, 503, 504))
async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
    """Embed a text, or several; as many at once as a request may have prompts."""
    server = server_of(request)
    model = server.served.name(body.model)
    salt = cache_salt(request, body.cache_salt)
    prompts = [
        replace(prompt, cache_salt=salt) for prompt in await anyio.to_thread.run_sync(_read, body, server.served)
    ]
    vectors: list[Any] = []
    for start in range(0, len(prompts), server.limits.prompts):
        vectors += await _run(server, request, prompts[start : start + server.limits.prompts])
    tokens = sum(len(prompt.token_ids) for prompt in prompts)
    return await anyio.to_thread.run_sync(_written, body, vectors, model, tokens)


def _read(body: EmbeddingRequest, served: ServedModel) -> list[EnginePrompt]:
    given: Any = body.input
    several = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
    adapter = served.adapter(served.name(body.model))
    prompts = []
    for each in several:
        ids = served.prompt(
            each, "input", completion=1, special=body.add_special_tokens, keep=body.truncate_prompt_tokens
        )
        prompts.append(EnginePrompt(ids, EMBEDDING, adapter, body.pooling or "last"))
    return prompts


async def _run(server: ServerState, request: Request, prompts: list[EnginePrompt]) -> list[Any]:
    job = server.bridge.submit(prompts)
    try:
        return await while_connected(request, _vectors(job, len(prompts)))
    finally:
        server.bridge.close(job)


async def _vectors(job: EngineJob, count: int) -> list[Any]:
    found: list[Any] = [None] * count
    async for which, delta in job:
        if delta.embedding is not None:
            found[which] = delta.embedding
    return found


def _written(body: EmbeddingRequest, vectors: list[Any], model: str, tokens: int) -> Response:
    numbers = [embedding_of(vector, body.normalize is not False) for vector in vectors]
    if body.encoding_format == "base64":
        return json_response(embeddings_of([_base64(each) for each in numbers], model, tokens))
    return json_response(embeddings_of(numbers, model, tokens))


def _base64(numbers: list[float]) -> str:
    return b64encode(np.asarray(numbers, "<f4").tobytes()).decode()
