"""The route, and the writer of its responses and streams."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from time import time
from typing import Any
from uuid import uuid4

import anyio.to_thread
from fastapi import APIRouter, Request
from starlette.responses import Response

from fullstride.llm.server.bodies import OffLoopRoute
from fullstride.llm.server.chat import ChatAnswer, read_chat
from fullstride.llm.server.context import Responder, server_of
from fullstride.llm.server.errors import ApiError, BadRequestError
from fullstride.llm.server.job import EngineJob
from fullstride.llm.server.responses.conversion import chat_of, renamed
from fullstride.llm.server.responses.items import ItemWriter
from fullstride.llm.server.schemas.responses import ResponseObject, ResponsesRequest
from fullstride.llm.server.streaming import GENERATING, event, json_response

router = APIRouter(route_class=OffLoopRoute)


@router.post("/v1/responses", response_model=ResponseObject, responses=GENERATING)
async def responses(body: ResponsesRequest, request: Request) -> Response:
    """Respond to an input; nothing is stored."""
    server = server_of(request)
    model = server.served.name(body.model)
    chat = chat_of(body)
    try:
        read = await anyio.to_thread.run_sync(read_chat, chat, server)
        check = await server.compile(request, read.param, read.shape, read.prompt.params.structured_outputs, read.calls)
    except BadRequestError as error:
        raise renamed(error) from error
    answer = ChatAnswer(server.served, chat, read.reader)
    responder = ResponsesResponder(server, chat, answer, model, "resp", check, asked=body)
    return await responder.send(request, [read.prompt])


@dataclass
class ResponsesResponder(Responder):
    """Response to a request of `/v1/responses`: its events, of which the last one has the whole."""

    done = b""
    asked: Any = None
    _writer: ItemWriter = field(default_factory=ItemWriter)
    _reasoning_tokens: int = 0

    async def _whole(self, job: EngineJob) -> Response:
        last: dict[str, Any] = {}
        async for each in self._written_events(job):
            last = each
        return await anyio.to_thread.run_sync(json_response, last["response"])

    async def _events(self, job: EngineJob) -> AsyncIterator[bytes]:
        number = 0
        try:
            async for each in self._written_events(job):
                yield event({**each, "sequence_number": number}, each["type"])
                number += 1
        except ApiError as error:
            # The fields of OpenAI's event, and those at which its client raises.
            said = {**error.body()["error"], **error.body(), "sequence_number": number}
            yield event({**said, "type": "error"}, "error")

    async def _written_events(self, job: EngineJob) -> AsyncIterator[dict[str, Any]]:
        head = self._settings()
        yield {"type": "response.created", "response": head}
        yield {"type": "response.in_progress", "response": head}
        choice: dict[str, Any] = {}
        async for which, delta in job:
            for choice in await self._written(which, delta):
                for each in self._writer.write(choice["delta"], choice["logprobs"]):
                    yield each
            self._reasoning_tokens += len(delta.token_ids) * self._writer.reasons
        status = "incomplete" if choice["finish_reason"] == "length" else "completed"
        for each in self._writer.close(status):
            yield each
        whole = head | {"status": status, "output": self._writer.output, "usage": self._counts(job)}
        if status == "incomplete":
            whole["incomplete_details"] = {"reason": "max_output_tokens"}
        if errors := choice.get("schema_errors"):
            whole["schema_errors"] = errors
        yield {"type": f"response.{status}", "response": whole}

    def _settings(self) -> dict[str, Any]:
        """Return a response without its output."""
        asked: ResponsesRequest = self.asked
        given = asked.model_dump(by_alias=True, exclude_none=True)
        return {
            "id": f"resp_{uuid4().hex}",
            "object": "response",
            "created_at": int(time()),
            "status": "in_progress",
            "model": self.model,
            "output": [],
            "usage": None,
            "incomplete_details": None,
            "error": None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None} | given.get("reasoning", {}),
            "store": False,
            "temperature": asked.temperature,
            "text": {"format": {"type": "text"}} | given.get("text", {}),
            "tool_choice": given.get("tool_choice", "auto"),
            "tools": [{"parameters": None, "strict": None} | tool for tool in given.get("tools", ())],
            "top_logprobs": asked.top_logprobs or 0,
            "top_p": asked.top_p,
            "truncation": "disabled",
        }

    def _counts(self, job: EngineJob) -> dict[str, Any]:
        usage = self._usage(job)
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": min(self._reasoning_tokens, usage["completion_tokens"])},
            "total_tokens": usage["total_tokens"],
        }
