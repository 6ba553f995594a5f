"""POST /tokenize and /detokenize, in vLLM's shape; GET /v1/models, /health and /ready."""

from typing import Any, Literal

from pydantic import BaseModel, Field, model_validator

from fullstride.llm.server.schemas.base import Few, Listed, Request, TokenIds
from fullstride.llm.server.schemas.chat import Tool
from fullstride.llm.server.schemas.messages import Message


class TokenizeRequest(Request):
    """A text or a chat: exactly one of `prompt` and `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: Few[Message] | None = None
    add_special_tokens: bool | None = Field(
        None, description="Default: true for a text, false for a chat, whose template adds them."
    )
    add_generation_prompt: bool = True
    split_special_tokens: bool = Field(
        default=True,
        description="See that of a chat.",
    )
    tools: Listed[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("send exactly one of prompt and messages")
        return self


class Tokenized(BaseModel):
    """The tokens of a text."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(Request):
    """Tokens to read."""

    model: str | None = None
    tokens: TokenIds


class Detokenized(BaseModel):
    """Text of the tokens, including special tokens."""

    prompt: str


class Model(BaseModel):
    """A name that the model answers to, or that of a LoRA adapter."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None = Field(None, description="Model that a LoRA adapter changes.")
    max_model_len: int


class Models(BaseModel):
    """List of models."""

    object: Literal["list"]
    data: list[Model]


class Status(BaseModel):
    """Status of the server."""

    status: Literal["ok", "degraded", "ready"]
