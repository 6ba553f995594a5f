import random
from typing import Any

import pytest

from fullstride.llm.server.tools.answers import AnswerFormat
from fullstride.llm.server.tools.call_parser import CallParser
from fullstride.llm.server.tools.formats import FORMATS
from fullstride.llm.server.tools.parsers import ToolParser
from fullstride.llm.server.tools.reasoning import ReasoningParser
from fullstride.llm.text.chat_template import ChatTemplate
from tests.llm.server.conftest import connected
from tests.llm.server.fake_engine import FakeEngine
from tests.llm.server.live import fake_server

CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
PIECES = ["<think>", "</think>", "\n", " ", "a", "é", "<", "</thi", "<think", CALL]
HELLO: Any = [{"role": "user", "content": "hello"}]


def _expected(text: str, thinking: bool) -> tuple[str, str]:
    """Reasoning and the rest."""
    if not thinking:
        if not text.lstrip().startswith("<think>"):
            return "", text
        text = text.lstrip()[len("<think>") :]
    thought, _, rest = text.partition("</think>")
    return thought, rest


@pytest.mark.parametrize("thinking", [False, True])
def test_however_a_text_comes_in_pieces(thinking, seed):
    draw = random.Random(seed)
    for _ in range(500):
        text = "".join(draw.choices(PIECES, k=draw.randrange(7)))
        thought, rest = _expected(text, thinking)
        for inner, calls in (
            (ToolParser(), 0),
            (CallParser(FORMATS["hermes"], {"f": True}, thinking=None), rest.count(CALL)),
        ):
            parser, given, pieces = ReasoningParser(inner, thinking), text, []
            while given:
                cut = draw.randint(1, 9)
                pieces += parser.read(given[:cut], last=False)
                given = given[cut:]
            pieces += parser.read("", last=True)
            assert "".join(piece.get("reasoning_content", "") for piece in pieces) == thought
            assert sum("tool_calls" in piece for piece in pieces) == calls
            if not calls:
                assert "".join(piece.get("content", "") for piece in pieces) == rest


@pytest.fixture
def says():
    """A client of a model that says this and whose template has the tags."""

    def make(text: str):
        return fake_server(FakeEngine(script=lambda prompt, params, index: text.encode()))

    return make


@pytest.mark.parametrize("strict", [False, True])
def test_thoughts_answers_and_calls_are_apart(says, strict):
    tools: Any = [{"type": "function", "function": {"name": "f", "strict": strict}}]
    thought = f"\nLet me {CALL} see.\n"
    with says(f"<think>{thought}</think>\n\nSo: {CALL}") as live, connected(live) as client:
        live.app.state.server.served.answers = AnswerFormat.of("auto", ChatTemplate("{{ '</think>' }}", {}))
        (whole,) = client.chat.completions.create(model="fake", messages=HELLO, tools=tools).choices
        message: Any = whole.message
        assert (message.reasoning_content, message.content, whole.finish_reason) == (thought, "\n\nSo: ", "tool_calls")
        assert [call.function.name for call in message.tool_calls] == ["f"]
        events = client.chat.completions.create(model="fake", messages=HELLO, tools=tools, stream=True)
        deltas = [event.choices[0].delta for event in events]
        assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == thought
        assert "".join(delta.content or "" for delta in deltas) == "\n\nSo: "
        extra = {"separate_reasoning": False}
        (plain,) = client.chat.completions.create(model="fake", messages=HELLO, tools=tools, extra_body=extra).choices
        assert plain.message.content == f"<think>{thought}</think>\n\nSo: "


def test_thoughts_that_were_cut_off_are_no_content(says):
    with says("<think>forever") as live, connected(live) as client:
        extra = {"separate_reasoning": True}
        (whole,) = client.chat.completions.create(model="fake", messages=HELLO, max_tokens=9, extra_body=extra).choices
        message: Any = whole.message
        assert (message.reasoning_content, message.content, whole.finish_reason) == ("fo", "", "length")
        extra |= {"response_format": {"type": "json_object"}}  # a text of that shape has no thoughts
        (held,) = client.chat.completions.create(model="fake", messages=HELLO, extra_body=extra).choices
        assert held.message.content == "<think>forever"
