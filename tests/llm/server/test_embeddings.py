"""Embeddings of a real engine, asked for by OpenAI's client, beside transformers' hidden states."""

import base64
import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import openai
import pytest
import torch
import transformers

from tests.llm.server.conftest import connected
from tests.llm.server.real import real_server


@pytest.fixture(scope="module")
def ask(tiny_engine):
    """Few prompts at once, so that longer lists are run in parts."""
    with real_server(*tiny_engine, prompts=3) as live, connected(live) as client:
        yield client


@pytest.fixture(scope="module")
def states(tiny_engine):
    """Last hidden states of transformers."""
    model = transformers.AutoModel.from_pretrained(tiny_engine[0].path).eval()

    def of(ids: list[int]) -> np.ndarray:
        with torch.no_grad():
            return model(torch.tensor([ids])).last_hidden_state[0].double().numpy()

    return of


def test_embeddings_of_texts_and_tokens(ask, tiny_engine, states, seed):
    rng = np.random.default_rng(seed)
    lists, text = (
        [rng.integers(3, 320, count).tolist() for count in (40, 1, 55, 33, 7)],
        "What is the capital of France?",
    )
    with ThreadPoolExecutor() as threads:  # more than the blocks can hold, so that some start over
        several = [threads.submit(ask.embeddings.create, model="tiny", input=lists) for _ in range(3)]
        one = ask.embeddings.create(model="tiny", input=text, extra_body={"normalize": False})
    expected = [states(ids)[-1] for ids in lists]
    for made in several:
        found = made.result()
        assert [each.index for each in found.data] == list(range(5))
        assert found.usage.prompt_tokens == found.usage.total_tokens == sum(map(len, lists))
        for each, vector in zip(found.data, expected, strict=True):
            np.testing.assert_allclose(each.embedding, vector / np.linalg.norm(vector), atol=1e-5)
    ids = tiny_engine[0].tokenizer.encode(text)
    np.testing.assert_allclose(one.data[0].embedding, states(ids)[-1], atol=1e-4)
    pooled = ask.embeddings.create(
        model="tiny", input=[ids, lists[2]], extra_body={"pooling": "mean", "normalize": False}
    )
    for each, own in zip(pooled.data, (ids, lists[2]), strict=True):
        np.testing.assert_allclose(each.embedding, states(own).mean(0), atol=1e-4)


def test_numbers_in_base64_are_those_in_json(ask):
    asked = {"model": "tiny", "input": [5, 6, 7]}
    raw = ask.embeddings.with_raw_response
    plain = json.loads(raw.create(**asked, encoding_format="float").text)
    packed = json.loads(raw.create(**asked, encoding_format="base64").text)
    numbers = np.frombuffer(base64.b64decode(packed["data"][0]["embedding"]), "<f4")
    np.testing.assert_array_equal(numbers, np.float32(plain["data"][0]["embedding"]))
    assert np.linalg.norm(numbers) == pytest.approx(1)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"dimensions": 8}, "'dimensions': embeddings have the model's hidden size"),
        ({"input": ""}, "'input' has no tokens"),
        ({"input": [5] * 64}, "maximum context length is 64 tokens"),
        ({"input": [999]}, "Token id 999 in 'input'"),
        ({"extra_body": {"pooling": "cls"}}, "'last' or 'mean'"),
    ],
)
def test_what_cannot_be_embedded_is_refused(ask, more, message):
    with pytest.raises(openai.BadRequestError, match=message):
        ask.embeddings.create(**{"model": "tiny", "input": "a", **more})
    assert len(ask.embeddings.create(model="tiny", input=[5] * 99, extra_body={"truncate_prompt_tokens": -1}).data) == 1
