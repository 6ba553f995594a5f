"""Token counts."""

from pydantic import BaseModel, Field


class PromptTokensDetails(BaseModel):
    """Of the prompt's tokens."""

    cached_tokens: int = Field(description="Found in the prefix cache.")


class Usage(BaseModel):
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
