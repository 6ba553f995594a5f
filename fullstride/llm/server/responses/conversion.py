"""Chat that says the same as a request to /v1/responses."""

import re
from collections.abc import Iterable
from typing import Any

from pydantic import ValidationError

from fullstride.llm.server.errors import BadRequestError, described
from fullstride.llm.server.schemas.chat import ChatRequest
from fullstride.llm.server.schemas.response_items import (
    FunctionCallItem,
    FunctionCallOutputItem,
    Item,
    MessageItem,
    ReasoningItem,
    text_of,
)
from fullstride.llm.server.schemas.responses import AllowedFunctions, FunctionTool, NamedFunction, ResponsesRequest

_SAME_NAME = (
    "model", "temperature", "top_p", "parallel_tool_calls", "presence_penalty", "frequency_penalty", "top_k", "min_p",
    "repetition_penalty", "seed", "stop", "stop_token_ids", "ignore_eos", "chat_template_kwargs", "stream",
    "cache_salt",
)  # fmt: skip


_OWN_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}


def chat_of(body: ResponsesRequest) -> ChatRequest:
    """Return the chat.

    Raises:
        BadRequestError: if there are settings that need others.

    """
    shown = {name: value for name in _SAME_NAME if (value := getattr(body, name)) is not None}
    shown["messages"] = [*_messages(body)]
    shown["max_completion_tokens"] = body.max_output_tokens
    shown["tools"] = [_tool(tool) for tool in body.tools] if body.tools else None
    shown["tool_choice"] = _choice(body)
    if body.reasoning is not None:
        shown["reasoning_effort"] = body.reasoning.effort
    if body.text is not None and body.text.format is not None:
        form = body.text.format.model_dump(by_alias=True, exclude_none=True)
        kind = form.pop("type")
        shown["response_format"] = {"type": kind} | ({"json_schema": form} if kind == "json_schema" else {})
    if "message.output_text.logprobs" in (body.include or ()):
        shown |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    elif body.top_logprobs:
        message = "'top_logprobs' needs 'message.output_text.logprobs' in 'include'."
        raise BadRequestError(message, param="top_logprobs")
    try:
        return ChatRequest.model_validate(shown)
    except ValidationError as error:
        raise renamed(described([{**each, "loc": ("body", *each["loc"])} for each in error.errors()])) from None


def renamed(error: BadRequestError) -> BadRequestError:
    """Return an error about a chat's parameter as one about the parameter that it comes from."""
    for chat, own in _OWN_NAMES.items():
        # Not with a place within it: items and messages are not one for one.
        error.message = re.sub(rf"'{chat}[^']*'", f"'{own}'", error.message)
        error.param = own if error.param is not None and error.param.startswith(chat) else error.param
    return error


def _messages(body: ResponsesRequest) -> Iterable[dict[str, Any]]:
    if body.instructions is not None:
        yield {"role": "system", "content": body.instructions}
    if isinstance(body.input, str):
        yield {"role": "user", "content": body.input}
        return
    answer: dict[str, Any] = {}
    for item in body.input:
        part = _part_of_answer(item)
        # What the model said comes in pieces, in the order of a message's parts.
        if answer and (part is None or not _continues(answer, part)):
            yield {"role": "assistant", **answer}
            answer = {}
        if part is not None:
            calls = [*answer.get("tool_calls", ()), *part.pop("tool_calls", ())]
            answer |= part | ({"tool_calls": calls} if calls else {})
        elif isinstance(item, FunctionCallOutputItem):
            yield {"role": "tool", "tool_call_id": item.call_id, "content": text_of(item.output)}
        elif isinstance(item, MessageItem):
            yield {"role": item.role, "content": text_of(item.content)}
    if answer:
        yield {"role": "assistant", **answer}


def _part_of_answer(item: Item) -> dict[str, Any] | None:
    """Return what an item adds to the assistant's message; None if it is not the assistant's."""
    if isinstance(item, ReasoningItem):
        return {"reasoning_content": text_of(item.content or item.summary)}
    if isinstance(item, FunctionCallItem):
        function = {"name": item.name, "arguments": item.arguments}
        return {"tool_calls": [{"id": item.call_id, "type": "function", "function": function}]}
    if isinstance(item, MessageItem) and item.role == "assistant":
        return {"content": text_of(item.content)}
    return None


def _continues(answer: dict[str, Any], part: dict[str, Any]) -> bool:
    """Return whether a part comes after all that a message has: reasoning, then content, then calls."""
    order = ("reasoning_content", "content", "tool_calls")
    latest = max(order.index(key) for key in answer)
    (new,) = (order.index(key) for key in part)
    return new > latest or "tool_calls" in part


def _tool(tool: FunctionTool) -> dict[str, Any]:
    return {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}


def _choice(body: ResponsesRequest) -> Any:
    def named(tool: NamedFunction) -> dict[str, Any]:
        return {"type": "function", "function": {"name": tool.name}}

    choice = body.tool_choice
    if isinstance(choice, AllowedFunctions):
        allowed = {"mode": choice.mode, "tools": [named(tool) for tool in choice.tools]}
        return {"type": "allowed_tools", "allowed_tools": allowed}
    return named(choice) if isinstance(choice, NamedFunction) else choice
