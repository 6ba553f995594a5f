"""Items of /v1/responses: messages, calls and their results, and reasoning."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from fullstride.llm.server.schemas.base import Body, Few

# Fields of an answer's items that say nothing when they are sent back.
_ECHOED = frozenset(("annotations", "logprobs", "parsed", "parsed_arguments", "phase", "status"))
_ITEMS = ("message", "function_call", "function_call_output", "reasoning")
_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


class _Item(Body):
    @model_validator(mode="before")
    @classmethod
    def _without_echoes(cls, item: Any) -> Any:
        if not isinstance(item, dict):
            return item
        return {key: value for key, value in item.items() if value is not None and key not in _ECHOED}


class TextOfItem(_Item):
    """Piece of text."""

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _text_only(cls, part: Any) -> Any:
        if isinstance(part, dict) and part.get("type") not in _TEXTS:
            raise PydanticCustomError("unsupported_content", "this server supports text parts only")
        return part


Texts = Annotated[list[TextOfItem], Field(fail_fast=True)]


class MessageItem(_Item):
    """Message; `type` may be left out."""

    type: Literal["message"] = "message"
    id: str | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Texts


class FunctionCallItem(_Item):
    """Call that the model made."""

    type: Literal["function_call"]
    id: str | None = None
    call_id: str
    name: str
    arguments: str


class FunctionCallOutputItem(_Item):
    """Result of a call."""

    type: Literal["function_call_output"]
    id: str | None = None
    call_id: str
    output: str | Texts


class ReasoningItem(_Item):
    """Reasoning of the model, for templates that include it."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: Texts | None = None
    content: Texts | None = None
    encrypted_content: str | None = Field(None, description="Accepted without effect: content has the text.")


def _kind(item: Any) -> str | None:
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)
    return kind if isinstance(kind, str) else None


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionCallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(
        _kind,
        custom_error_type="unsupported_item",
        custom_error_message=f"expected an item of type {', '.join(_ITEMS)}",
    ),
]
Input = str | Few[Item]


def text_of(content: str | list[TextOfItem] | None) -> str:
    """Return a content as one text, parts joined by newlines as those of a chat's messages are."""
    return content if isinstance(content, str) else "\n".join(part.text for part in content or ())
