"""From a chat's messages to the prompt that the model's template makes of them."""

from collections.abc import Sequence
from typing import Any

from fullstride.errors import ConfigError
from fullstride.llm.server.errors import BadRequestError, refusing
from fullstride.llm.server.schemas.chat import Tool
from fullstride.llm.server.schemas.messages import Message
from fullstride.llm.server.served_model import Served
from fullstride.llm.text.chat_template import NoPlaceForToolsError
from fullstride.llm.text.messages import MessageError, plain_messages


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as templates read them; see `plain_messages`.

    Raises:
        BadRequestError: for a call's arguments that are no JSON object.

    """
    try:
        return plain_messages([message.model_dump(exclude={"parsed"}) for message in messages])
    except MessageError as error:
        raise BadRequestError(f"Invalid '{error.param}': expected {error.expected}.", param=error.param) from error


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


def chat_prompt(
    served: Served,
    messages: Sequence[Message],
    tools: list[dict[str, Any]] | None,
    add_generation_prompt: bool,
    kwargs: dict[str, Any],
    forced: bool = False,
) -> str:
    """The text of a chat; not for the event loop, since its time grows with the chat.

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
    try:
        return _rendered(served, made, tools, add_generation_prompt, kwargs, forced)
    except ConfigError as error:
        param = "tools" if isinstance(error, NoPlaceForToolsError) else "messages"
        raise refusing(error, param) from error
