"""Bodies that are made to be costly are refused at their first error."""

import pytest
from pydantic import ValidationError

from fullstride.llm.server.schemas.chat import ChatRequest
from fullstride.llm.server.schemas.completion import CompletionRequest
from fullstride.llm.server.schemas.routes import DetokenizeRequest

MESSAGES = [{"role": "user", "content": "x"}]
MANY = 9999


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionRequest, {"prompt": [1.5] * MANY}),
        (CompletionRequest, {"prompt": [[1]] * MANY}),
        (CompletionRequest, {"prompt": [""] * MANY}),
        (CompletionRequest, {"prompt": ["x"] + [1] * 999}),
        (CompletionRequest, {"prompt": "x", "stop_token_ids": [-1] * MANY}),
        (CompletionRequest, {"prompt": "x", "stop": [""] * MANY}),
        (CompletionRequest, {"prompt": "x", "logit_bias": {str(i): "x" for i in range(MANY)}}),
        (CompletionRequest, {"prompt": "x"} | {str(i): "x" for i in range(MANY)}),
        (ChatRequest, {"messages": [{}] * MANY}),
        (ChatRequest, {"messages": [{"role": "user", "content": [{}] * MANY}]}),
        (ChatRequest, {"messages": MESSAGES, "tools": [{}] * MANY}),
        (ChatRequest, {"messages": MESSAGES, "metadata": {str(i): i for i in range(MANY)}}),
        (DetokenizeRequest, {"tokens": [-1] * MANY}),
    ],
)
def test_errors_are_few(kind, body):
    with pytest.raises(ValidationError) as refused:
        kind.model_validate(body)
    assert refused.value.error_count() < 5


def test_many_tokens_are_fine():
    tokens = list(range(50_000))
    assert CompletionRequest.model_validate({"prompt": tokens}).prompt == tokens
    assert CompletionRequest.model_validate({"prompt": [tokens, tokens]}).prompt == [tokens, tokens]
