"""Shapes that cost too much are ended and named; others say what they take."""

import json
import threading

import psutil
import pytest

from fullstride.errors import ConfigError
from fullstride.llm.sampling_params import Structured
from fullstride.llm.server.tools.call_grammar import one_call
from fullstride.llm.text import grammar_trial
from fullstride.llm.text.confined import AbandonedError, TooCostlyError
from fullstride.llm.text.grammar import Compiler
from fullstride.llm.text.grammar_trial import Trial
from tests.llm.text.test_grammar import TOKENIZER


@pytest.fixture(scope="module")
def trial():
    """With half the time and a quarter of the memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammar_trial, "SECONDS", 1.0)
        patch.setattr(grammar_trial, "MEMORY", 64 << 20)
        return Trial(Compiler(TOKENIZER).words)


def wanted():
    return True


def schema(value):
    return Structured("json_schema", json.dumps(value))


def tool(parameters):
    return one_call({"f": {"type": "object"} | parameters})


WIDE = {"type": "integer", "multipleOf": 9_999_999, "minimum": -(10**15), "maximum": 10**15}


@pytest.mark.parametrize(
    "shape",
    [
        schema(WIDE),
        schema({"properties": {"a": {"type": "string", "maxLength": 80}, "b": {**WIDE, "multipleOf": 7654321}}}),
        schema({"type": "number", "multipleOf": 34567.89, "description": "not \"pattern\": \"this\""}),
        schema({"allOf": [{"type": "integer", "multipleOf": prime} for prime in (997, 991, 983)]}),
        tool({"properties": {"n": {**WIDE, "multipleOf": 8_888_887}}}),
    ],
)  # fmt: skip
def test_what_costs_too_much_is_refused_with_its_keyword(trial, shape):
    with pytest.raises(TooCostlyError, match=r"what costs most seems to be multipleOf = \d.*; ask for less") as caught:
        trial.bytes_of(shape, wanted)
    assert len(str(caught.value)) < 250


def test_others_say_what_they_take(trial, seed):
    small = trial.bytes_of(Structured("regex", f"[a-z]{{3}}{seed}"), wanted)
    large = trial.bytes_of(schema({"type": "integer", "multipleOf": 40_009 + 2 * seed}), wanted)
    assert 0 <= small < 2 << 20
    assert 2 << 20 < large < 40 << 20


@pytest.mark.parametrize(
    ("shape", "why"), [(schema({"not": {}}), "no text conforms"), (Structured("regex", "("), "unclosed")]
)
def test_what_is_not_understood_says_why(trial, shape, why):
    with pytest.raises(ConfigError, match=f"not accepted: .*{why}") as caught:
        trial.bytes_of(shape, wanted)
    assert not isinstance(caught.value, TooCostlyError)


def test_the_work_ends_with_its_client(trial):
    trial.bytes_of(Structured("json_object"), wanted)
    process, _ = trial._tried._running
    gone = threading.Event()
    timer = threading.Timer(0.1, gone.set)
    timer.start()
    with pytest.raises(AbandonedError):
        trial.bytes_of(schema(WIDE), lambda: not gone.is_set())
    assert not psutil.pid_exists(process.pid)
    assert trial.bytes_of(Structured("json_object"), wanted) >= 0
