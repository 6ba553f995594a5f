"""POST /v1/chat/completions."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from fullstride.llm.server.schemas.base import Body, Count, Few, Keyed, Listed, SamplingRequest, Usage
from fullstride.llm.server.schemas.messages import Message


class Function(Body):
    """Function that the model may call; `parameters` is a JSON schema of its arguments."""

    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = Field(
        None, description="Constrain the arguments by the schema; else a violation is only in schema_errors."
    )


class Tool(Body):
    """Tool: a function."""

    type: Literal["function"]
    function: Function


class FunctionName(Body):
    """Name of a function to call."""

    name: str


class NamedTool(Body):
    """The tool to call."""

    type: Literal["function"]
    function: FunctionName


class AllowedSet(Body):
    """Tools that may be called; `required` forces a call of one of them."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(fail_fast=True, min_length=1)]


class AllowedTools(Body):
    """Some of the tools, of which the model still sees all, so that the prompt stays cached."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedSet


class TextFormat(Body):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(Body):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchema(Body):
    """A schema and what it is called; `strict` is always so here: the text conforms."""

    name: str = Field(min_length=1, max_length=64)
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(Body):
    """JSON of a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class ChatRequest(SamplingRequest):
    """A chat to continue."""

    messages: Few[Message]
    max_completion_tokens: Count | None = Field(None, description="The newer name of max_tokens.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0)
    prompt_logprobs: int | None = Field(
        None, ge=0, description="Extension of vLLM: most probable tokens at each place of the prompt; not in streams."
    )
    response_format: ResponseFormat | None = None
    tools: Listed[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Variables passed to the model's chat template."
    )
    split_special_tokens: bool = Field(
        default=True,
        description="Encode special tokens that messages spell as text, so that no text can end a message or forge a "
        "role; false makes tokens of them, as transformers does.",
    )
    add_generation_prompt: bool = True
    continue_final_message: bool = Field(
        default=False,
        description="Continue the last message, of the assistant; add_generation_prompt has to be false.",
    )
    separate_reasoning: bool | None = Field(
        None,
        description="Return what is in <think> tags at the beginning as reasoning_content, not as content. "
        "Default: true if the model's chat template has these tags.",
    )
    reasoning_effort: str | None = Field(
        None, max_length=64, description="Passed to the model's chat template; refused if that does not read it."
    )
    metadata: Keyed[str] | None = Field(None, description="Accepted without effect.")
    safety_identifier: str | None = Field(None, description="Accepted without effect.")
    prompt_cache_key: str | None = Field(None, description="Accepted without effect: every prefix is cached.")

    @property
    def no_tokens(self) -> bool:
        """By either of its names."""
        return 0 in (self.max_tokens, self.max_completion_tokens)


class TopLogprob(BaseModel):
    """A token and its probability."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """A chosen token, and the most probable ones at its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Logprobs of a choice, one entry per token."""

    content: list[TokenLogprob]
    refusal: None = None


class CallOfFunction(BaseModel):
    """Called function, with its arguments as a JSON object in text."""

    name: str
    arguments: str


class ToolCallMade(BaseModel):
    """Tool call of the model."""

    id: str
    type: Literal["function"]
    function: CallOfFunction


class AnswerMessage(BaseModel):
    """Message that the model generated."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None = Field(None, description="What the model thought first, if it is separated.")
    refusal: None = None
    tool_calls: list[ToolCallMade] | None = None


class ChatChoice(BaseModel):
    """Choice of a chat."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: str | int | None = Field(description="Stop text or token id that ended the completion.")
    token_ids: list[int] | None = Field(None, description="With return_token_ids.")
    schema_errors: list[str] | None = Field(
        None, description="Violations of the schemas by the text, or by its tool calls; absent if there are none."
    )


class PromptLogprob(BaseModel):
    """Probability of a token at a place of the prompt."""

    logprob: float
    rank: int
    decoded_token: str


class ChatCompletion(BaseModel):
    """The response; a stream's events have `delta` in place of `message`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = Field(None, description="With return_token_ids; in a stream's first event.")
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = Field(
        None, description="With prompt_logprobs: by token id, the prompt's own token and the most probable ones."
    )
