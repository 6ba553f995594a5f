"""From a chat's messages to the prompt that the model's template makes of them."""

import json
from collections.abc import Sequence
from typing import Any

import anyio.to_thread

from fullstride.errors import ConfigError
from fullstride.llm.chat_template import NoPlaceForToolsError
from fullstride.llm.server.errors import BadRequestError, refusing
from fullstride.llm.server.schemas.chat import Tool
from fullstride.llm.server.schemas.messages import (
    AssistantMessage,
    Content,
    Message,
    SystemMessage,
    ToolCall,
    ToolMessage,
    UserMessage,
)
from fullstride.llm.server.served import INLINE, Served
from fullstride.llm.server.tool_readers import whole_characters

AnyMessage = SystemMessage | UserMessage | AssistantMessage | ToolMessage


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as templates read them: `developer` is `system`, parts are joined by newlines, arguments are values.

    Raises:
        BadRequestError: for a call's arguments that are no JSON object.

    """
    return [_message(i, message) for i, message in enumerate(messages)]


def _message(i: int, message: AnyMessage) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    made: dict[str, Any] = {"role": role, "content": _text(message.content)}
    if message.name is not None:
        made["name"] = message.name
    if isinstance(message, ToolMessage):
        made["tool_call_id"] = message.tool_call_id
    if isinstance(message, AssistantMessage) and message.reasoning_content is not None:
        made["reasoning_content"] = message.reasoning_content
    if isinstance(message, AssistantMessage) and message.tool_calls:
        made["tool_calls"] = [_call(f"messages.{i}.tool_calls.{j}", call) for j, call in enumerate(message.tool_calls)]
    return made


def _text(content: Content | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.text for part in content)


def _call(param: str, call: ToolCall) -> dict[str, Any]:
    try:
        arguments = json.loads(call.function.arguments or "{}")
        if "\\u" in call.function.arguments:
            arguments = json.loads(whole_characters(json.dumps(arguments, ensure_ascii=False)))
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        message = f"Invalid '{param}.function.arguments': expected a JSON object as text."
        raise BadRequestError(message, param=f"{param}.function.arguments")
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def template_tools(tools: Sequence[Tool]) -> list[dict[str, Any]] | None:
    """Tools as templates read them; None if there are none."""
    return [tool.model_dump(exclude_none=True) for tool in tools] or None


def _rendered(
    served: Served,
    made: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    add_generation_prompt: bool,
    kwargs: dict[str, Any],
    forced: bool,
) -> str:
    try:
        return served.tokenizer.chat(made, tools, add_generation_prompt, **kwargs)
    except NoPlaceForToolsError:
        if not forced:
            raise
        return served.tokenizer.chat(made, None, add_generation_prompt, **kwargs)


async def chat_prompt(
    served: Served,
    messages: Sequence[Message],
    tools: list[dict[str, Any]] | None,
    add_generation_prompt: bool,
    kwargs: dict[str, Any],
    forced: bool = False,
) -> str:
    """The text of a chat; a long one is made in a thread.

    Args:
        served: the model.
        messages: of the chat.
        tools: that the template shows.
        add_generation_prompt: end where the assistant is to speak.
        kwargs: whatever else the template reads.
        forced: the answer will have a call's shape, whether the template has a place for tools or not.

    Raises:
        BadRequestError: see `template_messages`; and if the model has no template, or its template refuses the messages
            or has no place for the tools.

    """
    made = template_messages(messages)

    def render() -> str:
        try:
            return _rendered(served, made, tools, add_generation_prompt, kwargs, forced)
        except ConfigError as error:
            param = "tools" if isinstance(error, NoPlaceForToolsError) else "messages"
            raise refusing(error, param) from error

    if sum(len(message["content"]) for message in made) <= INLINE and not tools:
        return render()
    return await anyio.to_thread.run_sync(render)
