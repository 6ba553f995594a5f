"""POST /v1/responses."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from fullstride.llm.server.schemas.base import (
    INT32,
    INT64,
    Body,
    CacheSalt,
    Count,
    Keyed,
    Listed,
    PromptTokensDetails,
    Request,
    Text,
    TokenIds,
)
from fullstride.llm.server.schemas.chat import JsonObjectFormat, TextFormat
from fullstride.llm.server.schemas.response_items import Input


class FunctionTool(Body):
    """Function that the model may call; `parameters` is a JSON schema of its arguments."""

    type: Literal["function"]
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = Field(None, description="Constrain the arguments by the schema; default: only check them.")


class NamedFunction(Body):
    """Function to call."""

    type: Literal["function"]
    name: str


class AllowedFunctions(Body):
    """Some of the tools, of which the model still sees all."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Field(fail_fast=True, min_length=1)]


class SchemaFormat(Body):
    """JSON of a schema; `strict` is always so here."""

    type: Literal["json_schema"]
    name: str = Field(min_length=1, max_length=64)
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class TextConfig(Body):
    """Shape of the text."""

    format: Annotated[TextFormat | JsonObjectFormat | SchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(Body):
    """Settings of reasoning, which comes as it was written, without a summary."""

    effort: str | None = Field(None, max_length=64, description="See reasoning_effort of a chat.")
    summary: Literal["auto"] | None = Field(None, description="Accepted without effect: there is none.")
    generate_summary: Literal["auto"] | None = Field(None, description="The older name of summary.")


class ResponseStreamOptions(Body):
    """Options of a stream."""

    include_obfuscation: bool = Field(default=False, description="Accepted without effect: events are not padded.")


class ResponsesRequest(Request):
    """Input to respond to; nothing is stored. The second half are vLLM's extensions."""

    model: str | None = Field(None, description="Name listed by /v1/models; the served model if absent.")
    input: Input
    instructions: str | None = Field(None, description="Message of the system, before the input.")
    max_output_tokens: Count | None = None
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    tools: Listed[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | AllowedFunctions | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    top_logprobs: int | None = Field(None, ge=0)
    include: Listed[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    metadata: Keyed[str] | None = None
    user: str | None = Field(None, description="Accepted without effect.")
    safety_identifier: str | None = Field(None, description="Accepted without effect.")
    prompt_cache_key: str | None = Field(None, description="Accepted without effect: every prefix is cached.")

    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    top_k: int | None = Field(None, ge=-1, le=INT32)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0)
    seed: int | None = Field(None, ge=-INT64 - 1, le=INT64)
    stop: Text | Listed[Text] | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: CacheSalt = None


class OutputTokensDetails(BaseModel):
    """Details of the output's tokens."""

    reasoning_tokens: int = Field(description="Up to the tokens of one event too many.")


class InputTokensDetails(PromptTokensDetails):
    """Details of the input's tokens."""

    cache_write_tokens: int = Field(0, description="Not counted.")


class ResponseUsage(BaseModel):
    """Token counts of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(BaseModel):
    """Reason why a response is not whole."""

    reason: Literal["max_output_tokens"]


class ResponseObject(BaseModel):
    """The response: settings of the request, and items of reasoning, messages and function calls."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete"]
    model: str
    output: list[dict[str, Any]]
    usage: ResponseUsage | None
    incomplete_details: IncompleteDetails | None
    error: None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: dict[str, Any]
    store: Literal[False]
    temperature: float | None
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float | None
    truncation: Literal["disabled"]
    schema_errors: list[str] | None = Field(None, description="Violations of schemas; absent if there are none.")
