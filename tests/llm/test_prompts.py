"""Forms of prompts that are accepted; all others are rejected."""

import inspect

import pytest

from fullstride.errors import ConfigError
from fullstride.llm import LLM
from fullstride.llm.prompts import conversations

HELLO = {"role": "user", "content": "Hello"}


@pytest.mark.parametrize("wrong", [HELLO, "Hello", [], [[]], [[HELLO], []], ["Hello"], [[HELLO], "Hello"], None, 7])
def test_what_is_no_conversation_is_refused(wrong):
    with pytest.raises(ConfigError, match=r"messages=.*: expected a list of messages"):
        conversations(wrong)  # past the annotations, which users' programs do not check


def test_a_conversation_or_several():
    assert [*conversations([HELLO])] == [[HELLO]]
    assert [*conversations(([HELLO], (HELLO, HELLO)))] == [[HELLO], (HELLO, HELLO)]


@pytest.mark.parametrize("wrong", [None, 7, {"model": "smollm2"}])
def test_what_is_no_model_is_refused(wrong):
    with pytest.raises(ConfigError, match=r"model=.*: expected a path, a name, .*fullstride.llm.weights.load"):
        inspect.unwrap(LLM.__init__)(object.__new__(LLM), wrong)
