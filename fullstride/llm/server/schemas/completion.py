"""POST /v1/completions."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Field, Tag

from fullstride.llm.server.schemas.base import Few, SamplingRequest, SomeTokenIds, Usage


def _kind(prompt: Any) -> str:
    """Which of the four ways it is, by its first element, so that the others are not tried on millions of them."""
    if not isinstance(prompt, list):
        return "text"
    first = prompt[0] if prompt else ""
    return "lists" if isinstance(first, list) else "texts" if isinstance(first, str) else "tokens"


Prompt = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[Few[str], Tag("texts")]
    | Annotated[SomeTokenIds, Tag("tokens")]
    | Annotated[Few[SomeTokenIds], Tag("lists")],
    Discriminator(_kind),
]


class CompletionRequest(SamplingRequest):
    """A prompt or several, as text or as token ids."""

    prompt: Prompt
    echo: bool | None = Field(None, description="Repeat the prompt before the completion.")
    logprobs: int | None = Field(
        None,
        ge=0,
        description="Number of most probable tokens whose logprobs to return, in addition to the chosen token's.",
    )
    add_special_tokens: bool = Field(
        True, description="Put the model's begin-of-text token, if it has one, before a text."
    )


class CompletionLogprobs(BaseModel):
    """One entry a token; the first of a prompt has no probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """One completion."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: str | int | None = Field(description="Stop text or token id that ended the completion.")
    prompt_token_ids: list[int] | None = Field(None, description="With return_token_ids; in a stream's first event.")
    token_ids: list[int] | None = Field(None, description="With return_token_ids.")
    schema_errors: list[str] | None = Field(
        None, description="Violations of the schema by the text; absent if there are none."
    )


class Completion(BaseModel):
    """The response; a stream's events are of the same shape."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None
