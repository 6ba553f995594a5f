"""Conversion of conversations from OpenAI's API to the form that chat templates read."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fullstride.errors import ConfigError
from fullstride.llm.text.utf8_stream import whole_characters


class MessageError(ConfigError):
    """Error in a part of a message.

    Attributes:
        param, expected: location, such as `messages.0.content`, and the values allowed.

    """

    def __init__(self, param: str, value: object, expected: str):
        """Compose the message, with the value received."""
        super().__init__(f"{param}={value!r}: expected {expected}")
        self.param, self.expected = param, expected


def plain_messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Convert messages for templates: `developer` becomes `system`, parts are joined by newlines, arguments parsed.

    What is None is left out, but for the content; other keys stay as they are.

    Args:
        messages: dicts as OpenAI's API has them; a call's arguments may be values already.

    Raises:
        MessageError: for what is no dict, has no role or a part that is no text, a call without a name, or arguments
            that are no JSON object.

    """
    return [_message(f"messages.{i}", message) for i, message in enumerate(messages)]


def _message(param: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise MessageError(param, message, "a dict, such as message.model_dump() of an OpenAI client's")
    made = {key: value for key, value in message.items() if value is not None}
    if not isinstance(made.get("role"), str):
        raise MessageError(f"{param}.role", made.get("role"), "the role of the message's author, such as 'user'")
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
            raise MessageError(f"{param}.{j}", part, '{"type": "text", "text": ...}: the model supports text only')
    return "\n".join(part["text"] for part in content)


def _call(param: str, call: Any) -> dict[str, Any]:
    # Templates may write out a whole call or function, so keys and their order are part of the prompt.
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not (isinstance(function, Mapping) and "name" in function):
        raise MessageError(param, call, "a dict with the name and the arguments of a function")
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
        raise MessageError(f"{param}.function.arguments", given, "a JSON object as text")
    own = {"id": call["id"]} if "id" in call else {}
    return {**own, "type": "function", "function": {"name": function["name"], "arguments": arguments}}
