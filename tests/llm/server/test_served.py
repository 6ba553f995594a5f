import asyncio
import threading

import pytest

from fullstride.llm.server.errors import BadRequestError, NotFoundError
from fullstride.llm.server.served import INLINE, Served
from tests.llm.server.fake_tokenizer import FakeTokenizer


class Watched(FakeTokenizer):
    """Notes in which threads it encodes."""

    def __init__(self):
        self.threads: list[threading.Thread] = []

    def encode(self, text: str, special: bool = True) -> list[int]:
        self.threads.append(threading.current_thread())
        return super().encode(text, special)


def _encode(served: Served, text: str) -> list[int]:
    async def run() -> list[int]:
        return await served.encode(text, "prompt", special=False)

    return asyncio.run(run())


def test_long_texts_are_encoded_beside_the_loop():
    tokenizer = Watched()
    served = Served(("m",), tokenizer, 10_000)
    for size in (INLINE, INLINE + 1):
        assert len(_encode(served, "x" * size)) == size
    assert asyncio.run(served.text([97] * (INLINE + 1))) == "a" * (INLINE + 1)
    assert [thread is threading.main_thread() for thread in tokenizer.threads] == [True, False]


def test_texts_that_no_tokens_could_shorten_enough_are_not_encoded():
    tokenizer = Watched()
    served = Served(("m",), tokenizer, 10)
    assert served.longest_token == len("<assistant>")
    with pytest.raises(BadRequestError, match="more than 10"):
        _encode(served, "x" * (10 * served.longest_token + 1))
    assert tokenizer.threads == []
    with pytest.raises(BadRequestError, match="10 \\+ 1"):
        _encode(served, "x" * 10)


def test_names():
    served = Served(("a", "b"), FakeTokenizer(), 10)
    assert (served.name(None), served.name("b")) == ("a", "b")
    with pytest.raises(NotFoundError, match="has a, b"):
        served.name("c")
