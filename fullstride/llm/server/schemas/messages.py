"""The messages of a chat."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from fullstride.llm.server.schemas.base import Body, Few

# What the official client sends back of an answer, and has nothing to say: None, or this.
_EMPTY_IN_ANSWERS: dict[str, Any] = {
    "annotations": [],
    "audio": None,
    "function_call": None,
    "refusal": "",
    "reasoning": "",
    "tool_calls": [],
}


class TextPart(Body):
    """A piece of text."""

    type: Literal["text"]
    text: str


Content = str | Few[TextPart]


class _Message(Body):
    @model_validator(mode="before")
    @classmethod
    def _text_only(cls, message: Any) -> Any:
        if not isinstance(message, dict):
            return message
        parts = message.get("content")
        for part in parts if isinstance(parts, list) else ():
            if isinstance(part, dict) and part.get("type", "text") != "text":
                raise PydanticCustomError("unsupported_content", "this server supports text parts only")
        nothing = {key for key, empty in _EMPTY_IN_ANSWERS.items() if message.get(key) in (None, empty)}
        return {key: value for key, value in message.items() if key not in nothing}


class SystemMessage(_Message):
    """Instructions; `developer` is newer OpenAI's word for `system`, and is given to templates as that."""

    role: Literal["system", "developer"]
    content: Content
    name: str | None = None


class UserMessage(_Message):
    """Message of the user."""

    role: Literal["user"]
    content: Content
    name: str | None = None


class CalledFunction(Body):
    """A function and its arguments, a JSON object as text."""

    name: str
    arguments: str
    parsed_arguments: Any = Field(None, description="Field of the official client's `parse`. Accepted without effect.")


class ToolCall(Body):
    """A call that the model made."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = Field(None, description="Index of a streamed call. Accepted without effect.")


class AssistantMessage(_Message):
    """Earlier message of the model."""

    role: Literal["assistant"]
    content: Content | None = None
    name: str | None = None
    tool_calls: Few[ToolCall] | None = None
    reasoning_content: str | None = Field(None, description="Reasoning of the model, for templates that include it.")
    parsed: Any = Field(None, description="Field of the official client's `parse`. Accepted without effect.")


class ToolMessage(_Message):
    """Result of a called function."""

    role: Literal["tool"]
    content: Content
    tool_call_id: str
    name: str | None = None


Message = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]
