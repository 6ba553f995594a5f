"""Prompts of chats, made from messages by the model's template."""

import json
from collections.abc import Sequence
from typing import Any

from fullstride.errors import ConfigError
from fullstride.llm.sampling_params import ParamError
from fullstride.llm.server.errors import BadRequestError, refusing
from fullstride.llm.server.limits import ServerLimits
from fullstride.llm.server.sampling import at_most
from fullstride.llm.server.schemas.chat import ChatRequest, Tool
from fullstride.llm.server.schemas.messages import Message
from fullstride.llm.server.schemas.routes import TokenizeRequest
from fullstride.llm.server.served_model import ServedModel
from fullstride.llm.text.chat_template import NoPlaceForToolsError
from fullstride.llm.text.messages import plain_messages


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as templates read them; see `plain_messages`.

    Raises:
        BadRequestError: for a call's arguments that are no JSON object.

    """
    try:
        return plain_messages([message.model_dump(exclude={"parsed"}) for message in messages])
    except ParamError as error:
        raise BadRequestError(f"Invalid '{error.param}': expected {error.expected}.", param=error.param) from error


def chat_prompt(
    body: ChatRequest | TokenizeRequest,
    served: ServedModel,
    limits: ServerLimits,
    tools: Sequence[Tool],
    forced: bool = False,
) -> str:
    """Render a chat as text; do not call it on the event loop, since its time grows with the chat.

    Args:
        body: with the messages, and what else the template reads.
        served: the model.
        limits: of requests.
        tools: that the template shows.
        forced: whether the answer must be a tool call, even if the template has no place for tools.

    Raises:
        BadRequestError: see `template_messages`; if there are too many messages, or arguments that the template cannot
            have; and if the model has no template, or its template refuses the messages or has no place for the tools.

    """
    at_most("messages", len(body.messages or ()), limits.messages, " messages")
    kwargs = body.chat_template_kwargs or {}
    _check_arguments(kwargs, limits)
    made = template_messages(body.messages or ())
    shown = [tool.model_dump(exclude_none=True) for tool in tools] or None
    try:
        try:
            return served.tokenizer.chat(made, shown, body.add_generation_prompt, **kwargs)
        except NoPlaceForToolsError:
            if not forced:
                raise
            return served.tokenizer.chat(made, None, body.add_generation_prompt, **kwargs)
    except ConfigError as error:
        param = "tools" if isinstance(error, NoPlaceForToolsError) else "messages"
        raise refusing(error, param) from error


def _check_arguments(kwargs: dict[str, Any], limits: ServerLimits) -> None:
    """Refuse arguments for the template that are too large, replace the server's own, or that Jinja has a use for."""
    if own := {"messages", "tools", "add_generation_prompt"} & kwargs.keys():
        message = f"chat_template_kwargs: send {min(own)} as a parameter of the request instead."
        raise BadRequestError(message, param="chat_template_kwargs")
    if "self" in kwargs:
        message = "chat_template_kwargs: 'self' is reserved by Jinja; use another name."
        raise BadRequestError(message, param="chat_template_kwargs")
    at_most("chat_template_kwargs", len(json.dumps(kwargs)), limits.schema_bytes, " bytes")
