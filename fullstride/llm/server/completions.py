"""POST /v1/completions."""

from collections.abc import Mapping
from typing import Any

import anyio.to_thread
from fastapi import APIRouter, Request
from starlette.responses import Response

from fullstride.llm.outputs import Delta
from fullstride.llm.server.bodies import OffLoopRoute
from fullstride.llm.server.context import Responder, ServerState, server_of
from fullstride.llm.server.job import EnginePrompt
from fullstride.llm.server.logprobs import CompletionLogprobsWriter
from fullstride.llm.server.sampling import at_most, check_limits, sampling_params
from fullstride.llm.server.schemas.completion import Completion, CompletionRequest
from fullstride.llm.server.served_model import ServedModel
from fullstride.llm.server.streaming import GENERATING
from fullstride.llm.server.tools.shapes import structured
from fullstride.llm.text.utf8_stream import goes_on

router = APIRouter(route_class=OffLoopRoute)
# Default of OpenAI and vLLM.
DEFAULT_MAX_TOKENS = 16


@router.post("/v1/completions", response_model=Completion, responses=GENERATING)
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Continue a prompt, or several."""
    server = server_of(request)
    model = server.served.name(body.model)
    param, prompts = await anyio.to_thread.run_sync(_read, body, server)
    shape = prompts[0].params.structured_outputs
    check = await server.compile(request, param, shape, shape)
    answer = CompletionAnswer(server.served, body, prompts)
    return await Responder(server, body, answer, model, "cmpl", check).send(request, prompts)


def _read(body: CompletionRequest, server: ServerState) -> tuple[str, list[EnginePrompt]]:
    """Return the parameter that constrains the text, and the engine's prompts."""
    limits, served = server.limits, server.served
    check_limits(body, limits)
    at_most("logprobs", body.logprobs, limits.logprobs)
    param, shape = structured(body, limits.schema_bytes)
    params = sampling_params(
        body,
        served,
        max_tokens=max(1, DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens),
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
        shape=shape,
    )
    several = _given(body)
    at_most("prompt", len(several), limits.prompts, " prompts")
    at_most("n", len(several) * params.n, limits.completions, " completions in all")
    prompts = []
    for each in several:
        ids = served.prompt(
            each,
            "prompt",
            completion=params.max_tokens or 1,
            special=body.add_special_tokens,
            keep=body.truncate_prompt_tokens,
        )
        prompts.append(EnginePrompt(ids, params))
    return param, prompts


def _given(body: CompletionRequest) -> list[Any]:
    """Return the prompts, each a text or token ids."""
    given: Any = body.prompt
    return given if isinstance(given, list) and not isinstance(given[0], int) else [given]


class CompletionAnswer:
    """Choices of all prompts in one list: prompt p's completion i is number p * n + i."""

    kind = chunk_kind = "text_completion"
    once: Mapping[str, Any] = {}

    def __init__(self, served: ServedModel, body: CompletionRequest, prompts: list[EnginePrompt]):
        """Write the completions of these prompts."""
        self._served, self._body, self._prompts = served, body, prompts
        self._n = body.n or 1
        tokenizer, self._writers = served.tokenizer, []
        for prompt in prompts:
            for _ in range(self._n):
                # The text begins with the prompt, or with the completion after it.
                beginning = tokenizer.beginning(() if body.echo else prompt.token_ids)
                writer = CompletionLogprobsWriter(tokenizer.token_bytes, tokenizer.special_texts, beginning)
                self._writers.append(writer)
        self._begun: set[int] = set()
        self._prompt_logprobs: dict[int, Any] = {}
        self._held: dict[int, list[Delta]] = {}

    def chunks(self, which: int, delta: Delta) -> list[dict[str, Any]]:
        """Return the chunks of a delta; they wait for the prompt's logprobs if those are requested."""
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs[which] = delta.prompt_logprobs
        held = self._held.setdefault(which, [])
        held.append(delta)
        if self._body.echo and self._body.logprobs is not None and which not in self._prompt_logprobs:
            # Only the first of a prompt's completions brings them.
            return []
        self._held[which] = []
        return [choice for each in held if (choice := self._choice(which, each)) is not None]

    def _choice(self, which: int, delta: Delta) -> dict[str, Any] | None:
        number, wanted = which * self._n + delta.index, self._body.logprobs is not None
        text, places, echo = delta.text, delta.logprobs or (), ""
        reason, stop = delta.finish_reason, delta.stop_reason
        if self._body.no_tokens:
            text, places = "", ()
            # The stop reason of a token that is left out is not reported.
            reason, stop = reason and "length", None
        if self._body.echo and number not in self._begun:
            echo = self._echo(which, delta)
            places = (*self._prompt_logprobs[which], *places) if wanted else ()
        ids: dict[str, Any] = {}
        if self._body.return_token_ids:
            prompt = None if number in self._begun else list(self._prompts[which].token_ids)
            ids = {"prompt_token_ids": prompt, "token_ids": [] if self._body.no_tokens else list(delta.token_ids)}
        self._begun.add(number)
        text, first = echo + text, self._prompts[which].token_ids[0]
        logprobs = self._writers[number].write(places, first, echo) if wanted else None
        if not (text or logprobs or ids or delta.finish_reason):
            return None
        return {
            "index": number,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": reason,
            "stop_reason": stop,
            **ids,
        }

    def _echo(self, which: int, delta: Delta) -> str:
        if isinstance(given := _given(self._body)[which], str) and self._body.truncate_prompt_tokens is None:
            return given
        tokenizer, ids = self._served.tokenizer, self._prompts[which].token_ids
        text = tokenizer.decode(ids, False)
        # Of a character that the prompt began and the completion goes on with, the completion has all.
        first = b"".join(map(tokenizer.token_bytes, delta.token_ids[:1])) if not self._body.no_tokens else b""
        return text.removesuffix("\ufffd") if goes_on(first) and tokenizer.beginning(ids).pending else text

    def whole(self, choice: dict[str, Any]) -> dict[str, Any]:
        """Return the whole choice, which has the same form."""
        return choice
