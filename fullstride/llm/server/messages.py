"""Prompts of chats, made from messages by the model's template."""

import json
import secrets
from collections.abc import Sequence
from typing import Any

from fullstride.errors import ConfigError
from fullstride.llm.sampling_params import ParamError
from fullstride.llm.server.errors import BadRequestError, refusing
from fullstride.llm.server.limits import ServerLimits
from fullstride.llm.server.sampling import at_most
from fullstride.llm.server.schemas.chat import ChatRequest, Tool
from fullstride.llm.server.schemas.messages import AssistantMessage, Message
from fullstride.llm.server.schemas.routes import TokenizeRequest
from fullstride.llm.server.served_model import ServedModel
from fullstride.llm.text.chat_template import NoPlaceForToolsError
from fullstride.llm.text.messages import plain_messages

# Cuts a prompt behind a message that is to be continued; no client can know it.
END_OF_MESSAGE = f"[{secrets.token_hex(16)}]"


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

    With `split_special_tokens` the text has placeholders for special tokens that messages spell; see `SpecialText`.

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
    if isinstance(body, ChatRequest) and body.reasoning_effort is not None:
        kwargs = {"reasoning_effort": _effort(body.reasoning_effort, served), **kwargs}
    _check_arguments(kwargs, limits)
    made = template_messages(body.messages or ())
    if body.split_special_tokens:
        made = [{**served.special.hide(message), "role": message["role"]} for message in made]
    shown = [tool.model_dump(exclude_none=True) for tool in tools] or None
    going_on = False
    if isinstance(body, ChatRequest) and body.continue_final_message:
        going_on = True
        _check_continued(body)
        made[-1] = {**made[-1], "content": made[-1]["content"] + END_OF_MESSAGE}
    try:
        try:
            text = served.tokenizer.chat(made, shown, body.add_generation_prompt, **kwargs)
        except NoPlaceForToolsError:
            if not forced:
                raise
            text = served.tokenizer.chat(made, None, body.add_generation_prompt, **kwargs)
    except ConfigError as error:
        param = "tools" if isinstance(error, NoPlaceForToolsError) else "messages"
        raise refusing(error, param) from error
    if going_on and END_OF_MESSAGE not in text:
        message = "continue_final_message: this model's chat template leaves out the final message."
        raise BadRequestError(message, param="continue_final_message")
    return text.rpartition(END_OF_MESSAGE)[0] if going_on else text


def _check_continued(body: ChatRequest) -> None:
    """Check that the final message can be continued.

    Raises:
        BadRequestError: if it is not the assistant's, or has no text, or a new answer is to begin.

    """
    last = body.messages[-1]
    if body.add_generation_prompt:
        expected = "expected add_generation_prompt to be false"
    elif not isinstance(last, AssistantMessage) or last.tool_calls or not last.content:
        expected = "expected the final message to be the assistant's, with a text and without tool calls"
    else:
        return
    raise BadRequestError(f"continue_final_message: {expected}.", param="continue_final_message")


def _effort(asked: str, served: ServedModel) -> str:
    template = served.tokenizer.template
    if template is None or not template.reads("reasoning_effort"):
        message = "this model's chat template does not read it; its own variables, such as enable_thinking, go into"
        raise BadRequestError(
            f"Unsupported parameter: 'reasoning_effort': {message} chat_template_kwargs.",
            param="reasoning_effort",
            code="unsupported_parameter",
        )
    return asked


def _check_arguments(kwargs: dict[str, Any], limits: ServerLimits) -> None:
    """Refuse arguments for the template that are too large, replace the server's own, or that Jinja has a use for."""
    if own := {"messages", "tools", "add_generation_prompt"} & kwargs.keys():
        message = f"chat_template_kwargs: send {min(own)} as a parameter of the request instead."
        raise BadRequestError(message, param="chat_template_kwargs")
    if "self" in kwargs:
        message = "chat_template_kwargs: 'self' is reserved by Jinja; use another name."
        raise BadRequestError(message, param="chat_template_kwargs")
    at_most("chat_template_kwargs", len(json.dumps(kwargs)), limits.schema_bytes, " bytes")
