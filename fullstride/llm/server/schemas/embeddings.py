"""POST /v1/embeddings."""

from typing import Any, Literal

from pydantic import BaseModel, Field

from fullstride.llm.outputs import Pooling
from fullstride.llm.server.schemas.base import INT32, CacheSalt, Request
from fullstride.llm.server.schemas.completion import Prompt


class EmbeddingRequest(Request):
    """A text or several, or their token ids, to embed."""

    input: Prompt
    model: str | None = Field(None, description="Name listed by /v1/models; the served model if absent.")
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="base64 is of little-endian float32 numbers. Default: float."
    )
    pooling: Pooling | None = Field(
        None, description="Whose last hidden state: the last token's (default), or the mean of all tokens'."
    )
    normalize: bool | None = Field(None, description="Divide by the Euclidean norm. Default: true.")
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, le=INT32, description="Keep at most so many tokens of an input, the last ones; -1: all that fit."
    )
    add_special_tokens: bool = Field(True, description="Add the special tokens that the tokenizer puts around a text.")
    cache_salt: CacheSalt = None
    user: str | None = Field(None, description="Accepted without effect.")


class Embedding(BaseModel):
    """Embedding of one input."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(BaseModel):
    """Token counts of a request."""

    prompt_tokens: int
    total_tokens: int


class Embeddings(BaseModel):
    """The response: embeddings in the order of the inputs."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


def embeddings_of(vectors: list[Any], model: str, tokens: int) -> dict[str, Any]:
    """Return the response with these embeddings."""
    data = [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(vectors)]
    return {"object": "list", "data": data, "model": model, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}
