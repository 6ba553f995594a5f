"""Conversion of conversations from OpenAI's API to the form that chat templates read."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fullstride.llm.sampling_params import ParamError
from fullstride.llm.text.utf8_stream import whole_characters


def plain_messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Convert messages for templates: `developer` becomes `system`, parts are joined by newlines, arguments parsed.

    What is None is left out, but for the content; other keys stay as they are.

    Args:
        messages: dicts as OpenAI's API has them; a call's arguments may be values already.

    Raises:
        ParamError: for what is no dict, has no role or a part that is no text, a call without a name, or arguments
            that are no JSON object.

    """
    return [_message(f"messages.{i}", message) for i, message in enumerate(messages)]


def _message(param: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ParamError(param, message, "a dict, such as message.model_dump() of an OpenAI client's")
    made = {key: value for key, value in message.items() if value is not None}
    if not isinstance(made.get("role"), str):
        raise ParamError(f"{param}.role", made.get("role"), "the role of the message's author, such as 'user'")
    if made.get("role") == "developer":
        made["role"] = "system"
    made["content"] = _text(f"{param}.content", made.get("content"))
    if calls := made.pop("tool_calls", None):
        made["tool_calls"] = [_call(f"{param}.tool_calls.{j}", call) for j, call in enumerate(calls)]
    return made


def _text(param: str, content: Any) -> Any:
    if not isinstance(content, list | tuple):
        return content
    for j, part in enumerate(content):
        if not (isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            raise ParamError(f"{param}.{j}", part, '{"type": "text", "text": ...}: the model supports text only')
    return "\n".join(part["text"] for part in content)


def _call(param: str, call: Any) -> dict[str, Any]:
    # Templates may write out a whole call or function, so keys and their order are part of the prompt.
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not (isinstance(function, Mapping) and "name" in function):
        raise ParamError(param, call, "a dict with the name and the arguments of a function")
    given = function.get("arguments")
    arguments = given or {}
    try:
        if isinstance(given, str) and given:
            arguments = json.loads(given)
            if "\\u" in given:
                arguments = json.loads(whole_characters(json.dumps(arguments, ensure_ascii=False)))
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, Mapping):
        raise ParamError(f"{param}.function.arguments", given, "a JSON object as text")
    own = {"id": call["id"]} if "id" in call else {}
    return {**own, "type": "function", "function": {"name": function["name"], "arguments": arguments}}
