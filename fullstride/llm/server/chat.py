"""POST /v1/chat/completions."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import anyio.to_thread
from fastapi import APIRouter, Request
from starlette.responses import Response

from fullstride.llm.outputs import Delta
from fullstride.llm.sampling_params import SamplingParams, Structured
from fullstride.llm.server.bodies import OffLoopRoute
from fullstride.llm.server.context import Responder, ServerState, server_of
from fullstride.llm.server.errors import BadRequestError
from fullstride.llm.server.job import EnginePrompt
from fullstride.llm.server.logprobs import chat_logprobs, prompt_logprobs
from fullstride.llm.server.messages import chat_prompt
from fullstride.llm.server.sampling import at_most, check_limits, sampling_params
from fullstride.llm.server.schemas.chat import ChatCompletion, ChatRequest
from fullstride.llm.server.served_model import ServedModel
from fullstride.llm.server.streaming import GENERATING, merge
from fullstride.llm.server.tools.conformance import CallSchemas
from fullstride.llm.server.tools.parsers import ToolParser
from fullstride.llm.server.tools.plan import ToolPlan
from fullstride.llm.server.tools.shapes import structured

router = APIRouter(route_class=OffLoopRoute)


@router.post("/v1/chat/completions", response_model=ChatCompletion, responses=GENERATING)
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """Answer a chat."""
    server = server_of(request)
    model = server.served.name(body.model)
    read = await anyio.to_thread.run_sync(read_chat, body, server)
    check = await server.compile(request, read.param, read.shape, read.prompt.params.structured_outputs, read.calls)
    answer = ChatAnswer(server.served, body, read.reader)
    if body.return_token_ids:
        answer.once["prompt_token_ids"] = list(read.prompt.token_ids)
    return await Responder(server, body, answer, model, "chatcmpl", check).send(request, [read.prompt])


@dataclass(frozen=True)
class ReadChat:
    """A request as it was read.

    Attributes:
        reader: makes a parser of one answer.
        prompt: of the engine.
        param: that asks for the shape.
        shape: of a text without calls.
        calls: that the text may have.

    """

    reader: Callable[[], ToolParser]
    prompt: EnginePrompt
    param: str
    shape: Structured | None
    calls: CallSchemas | None


def read_chat(body: ChatRequest, server: ServerState) -> ReadChat:
    """Return what a request to a chat asks for; for a thread.

    Raises:
        BadRequestError: if it cannot be served.

    """
    said = str(body.messages[-1].content) if body.continue_final_message else ""
    answers = server.served.answers.after(said)
    asked = ToolPlan.of(body, server.limits, answers)
    param, shape, params = _params(body, server, asked)
    rendered = chat_prompt(body, server.served, server.limits, asked.shown, forced=asked.forced is not None)
    text = server.served.special.shown(rendered)
    server.served.check_length(text, "messages")
    ids = server.served.special.encode(rendered)
    ids = server.served.fitting(ids, "messages", params.max_tokens or 1, body.truncate_prompt_tokens)
    thinking = answers.tags.begins(text) or answers.tags.goes_on(said)
    separates = answers.reasons if body.separate_reasoning is None else body.separate_reasoning
    reader, constraint, calls = asked.for_prompt(thinking, separates, shape)
    return ReadChat(reader, EnginePrompt(ids, replace(params, structured_outputs=constraint)), param, shape, calls)


def _params(body: ChatRequest, server: ServerState, asked: ToolPlan) -> tuple[str, Structured | None, SamplingParams]:
    """Return the parameter of the shape, the shape of a text without calls, and the engine's parameters without one."""
    check_limits(body, server.limits)
    at_most("top_logprobs", body.top_logprobs, server.limits.logprobs)
    at_most("prompt_logprobs", body.prompt_logprobs, server.limits.logprobs)
    if body.prompt_logprobs is not None and body.stream:
        raise BadRequestError("'prompt_logprobs' are not in streams; send stream: false.", param="prompt_logprobs")
    if body.top_logprobs and not body.logprobs:
        raise BadRequestError("'top_logprobs' needs 'logprobs' to be true.", param="top_logprobs")
    param, shape = structured(body, server.limits.schema_bytes)
    if shape is not None and asked.forced is not None:
        raise BadRequestError(
            "A forced tool call already constrains the text; send no other constraint.", param="tool_choice"
        )
    most = {value for value in (body.max_tokens, body.max_completion_tokens) if value is not None}
    if len(most) > 1:
        message = "max_tokens and max_completion_tokens differ; send the latter only."
        raise BadRequestError(message, param="max_completion_tokens")
    params = sampling_params(
        body,
        server.served,
        max_tokens=max(1, most.pop()) if most else None,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
    )
    return param or "tools", shape, params


class ChatAnswer:
    """Choices of one chat."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def __init__(self, served: ServedModel, body: ChatRequest, reader: Callable[[], ToolParser]):
        """Write the choices, each parsed by its own reader."""
        self._served = served
        self.once: dict[str, Any] = {}
        self._wants_ids = bool(body.return_token_ids)
        self._wants_logprobs, self._no_tokens = bool(body.logprobs), body.no_tokens
        self._readers: list[ToolParser] = [reader() for _ in range(body.n or 1)]
        self._begun: set[int] = set()

    def chunks(self, which: int, delta: Delta) -> list[dict[str, Any]]:
        """Return the role first, then new text, then the finish reason, in the order of OpenAI's events."""
        if self._no_tokens:
            reason = "length" if delta.finish_reason is not None else None
            delta = replace(delta, text="", token_ids=(), logprobs=None, finish_reason=reason, stop_reason=None)
        if delta.prompt_logprobs is not None:
            self.once["prompt_logprobs"] = prompt_logprobs(delta.prompt_logprobs, self._served.tokenizer.token_bytes)
        reader = self._readers[delta.index]
        pieces = reader.read(delta.text, last=delta.finish_reason is not None)
        logprobs = chat_logprobs(delta.logprobs, self._served.tokenizer.token_bytes) if self._wants_logprobs else None
        made = []
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            made.append(_choice(delta.index, {"role": "assistant", "content": "", "refusal": None}))
        if (logprobs or self._wants_ids) and not pieces:
            pieces = [{"content": ""}]
        for piece in pieces:
            made.append(_choice(delta.index, piece, logprobs))
            logprobs = None
        if delta.finish_reason is not None:
            reason = reader.finish_reason(delta.finish_reason)
            made.append(_choice(delta.index, {}) | {"finish_reason": reason, "stop_reason": delta.stop_reason})
        if self._wants_ids:
            made[0]["token_ids"] = list(delta.token_ids)
        return made

    def whole(self, choice: dict[str, Any]) -> dict[str, Any]:
        """Return the whole choice, with a message in place of deltas, and tool calls merged."""
        message = choice.pop("delta")
        calls: dict[int, dict[str, Any]] = {}
        for piece in message.pop("tool_calls", ()):
            calls[piece["index"]] = merge(calls.get(piece["index"]), piece)
        if calls:
            made = [{key: call[key] for key in ("id", "type", "function")} for call in calls.values()]
            message |= {"content": message["content"] or None, "tool_calls": made}
        return {"index": choice.pop("index"), "message": message, **choice}


def _choice(index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
