"""Base of all request bodies: no value is coerced, no unknown key is accepted."""

from collections.abc import Callable, Iterable
from typing import Annotated, Any, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WrapValidator,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from fullstride.llm.server.unsupported_params import without_neutral

INT32 = 2**31 - 1
INT64 = 2**63 - 1
TokenId = Annotated[int, Field(ge=0, le=INT32)]
T = TypeVar("T")
# Lists end at their first error: a body can hold millions of them, and each would be written down.
Listed = Annotated[list[T], Field(fail_fast=True)]
Some = Annotated[list[T], Field(fail_fast=True, min_length=1)]
# Of lists and objects that this server reads itself and is far from serving so many of: not even looked at.
MOST = 4096
# Of objects and lists in one another: schemas and tools are written as JSON again, by functions that call themselves.
DEEPEST = 256
Few = Annotated[list[T], Field(fail_fast=True, min_length=1, max_length=MOST)]
Text = Annotated[str, Field(min_length=1)]
CacheSalt = Annotated[
    Text | None,
    Field(description="Extension of vLLM: cached prompts are shared with requests of the same salt alone."),
]
Count = Annotated[int, Field(ge=0, le=INT32)]
# Tokens that are checked at once, in about 2 ms.
PIECE = 1 << 15


def _in_pieces(tokens: Any, check: Callable[[Any], Any]) -> Any:
    """Check a long list piece by piece, since pydantic holds Python's lock until it has seen all that it is given."""
    if not isinstance(tokens, list) or len(tokens) <= PIECE:
        return check(tokens)
    for start in range(0, len(tokens), PIECE):
        try:
            check(tokens[start : start + PIECE])
        except ValidationError as error:
            (first,) = error.errors(include_url=False)  # lists end at their first error
            # Any, as pydantic's types do not know its own errors as what it takes.
            place: Any = first["loc"][0]
            moved: Any = {**first, "loc": (start + place, *first["loc"][1:])}
            raise ValidationError.from_exception_data(error.title, [moved]) from None
    return tokens


TokenIds = Annotated[Listed[TokenId], WrapValidator(_in_pieces)]
SomeTokenIds = Annotated[Some[TokenId], WrapValidator(_in_pieces)]


def _few_keys(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MOST:
        raise PydanticCustomError("too_long", "Object should have at most {most} keys", {"most": MOST})
    return value


Keyed = Annotated[dict[str, T], BeforeValidator(_few_keys)]


def _is_text(value: str) -> bool:
    # JSON can hold half a surrogate pair, which is no character and which no tokenizer takes.
    return value.isascii() or not any("\ud800" <= char <= "\udfff" for char in value)


def _check_texts(body: Any) -> None:
    level = [body]
    for _ in range(DEEPEST):
        if not all(_is_text(value) for value in level if isinstance(value, str)):
            raise ValueError("a text contains an unpaired surrogate; send whole characters")
        level = [inner for value in level for inner in _inside(value)]
        if not level:
            return
    raise ValueError(f"it is nested more than {DEEPEST} levels deep; flatten it")


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return (*value, *value.values())
    return (inner for inner in value if not isinstance(inner, int)) if isinstance(value, list) else ()


class Body(BaseModel):
    """Refuses unknown keys as OpenAI does (vLLM ignores them): a misspelt parameter must not go unnoticed."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True)


class Request(Body):
    """The whole body of a request."""

    @model_validator(mode="before")
    @classmethod
    def _readable(cls, body: Any) -> Any:
        _check_texts(_few_keys(body))
        return without_neutral(body)


class StreamOptions(Body):
    """Options of a streamed response."""

    include_usage: bool = Field(default=False, description="Send a last chunk, without choices, with the token counts.")
    continuous_usage_stats: bool = Field(
        default=False, description="Extension of vLLM: with include_usage, every chunk has the token counts so far."
    )
    include_obfuscation: bool = Field(default=False, description="Accepted without effect: chunks are not padded.")

    @model_validator(mode="after")
    def _together(self) -> "StreamOptions":
        if self.continuous_usage_stats and not self.include_usage:
            raise ValueError("continuous_usage_stats needs include_usage to be true")
        return self


class StructuredOutputs(Body):
    """vLLM's way to ask for a shape: exactly one of these."""

    model_config = ConfigDict(json_schema_extra={"minProperties": 1, "maxProperties": 1})

    json_: dict[str, Any] | str | None = Field(None, alias="json", description="A JSON schema.")
    json_object: bool | None = None
    regex: str | None = None
    choice: Some[Text] | None = None
    grammar: str | None = Field(None, description="Grammar in llguidance's dialect of Lark.")


class SamplingRequest(Request):
    """Parameters of both generating routes. Defaults are OpenAI's; the second half are vLLM's extensions."""

    model: str | None = Field(None, description="Name listed by /v1/models; the served model if absent.")
    n: int | None = Field(None, ge=1, le=INT32)
    temperature: float | None = Field(
        None, ge=0, description="Sampling temperature; 0 is greedy. Default: the model's suggestion, or 1."
    )
    top_p: float | None = Field(None, gt=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: Keyed[Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: int | None = Field(None, ge=-INT64 - 1, le=INT64, description="-1 is none.")
    stop: Text | Listed[Text] | None = None
    max_tokens: Count | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, description="Accepted without effect.")

    top_k: int | None = Field(None, ge=-1, le=INT32)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0)
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    include_stop_str_in_output: bool | None = None
    regex: str | None = Field(None, description="Regular expression that the text must match.")
    grammar: str | None = Field(None, description="Lark grammar that the text must conform to.")
    structured_outputs: StructuredOutputs | None = None
    bad_words: Listed[Text] | None = Field(None, description="Words that the text must not have.")
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, le=INT32, description="Keep at most so many tokens of the prompt, the last ones; -1: all that fit."
    )
    return_token_ids: bool | None = Field(None, description="Return the ids of prompt and completion.")
    cache_salt: CacheSalt = None

    @field_validator("stream_options")
    @classmethod
    def _streams(cls, options: StreamOptions | None, info: Any) -> StreamOptions | None:
        if options is not None and not info.data.get("stream"):
            raise ValueError("only allowed when stream is true")
        return options

    @property
    def no_tokens(self) -> bool:
        """Tell whether none are asked for: the engine makes one all the same, which the answer leaves out."""
        return self.max_tokens == 0


class PromptTokensDetails(BaseModel):
    """Details of the prompt's tokens."""

    cached_tokens: int = Field(description="Prompt tokens found in the prefix cache.")


class Usage(BaseModel):
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
