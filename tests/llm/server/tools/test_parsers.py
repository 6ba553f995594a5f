import json
import random
from typing import Any

import pytest

from fullstride.llm.server.tools import cursor
from fullstride.llm.server.tools.call_parser import CallParser
from fullstride.llm.server.tools.cursor import JsonScanner, NoCallError
from fullstride.llm.server.tools.formats import FORMATS
from fullstride.llm.server.tools.parsers import ForcedTool
from fullstride.llm.server.tools.reasoning import THINK
from tests.llm.server.tools.test_plan import TIME, WEATHER

HERMES = FORMATS["hermes"]
NAMES: dict[str, Any] = dict.fromkeys(("weather", "time", "write"), True)
TRICKY = 'use </tool_call> to end, <tool_call> to begin, \\" and {[ ]}'
WRITE = f"<tool_call>{json.dumps({'name': 'write', 'arguments': {'text': TRICKY}})}</tool_call>"
TEXTS = [WEATHER + "x" + TIME, "a<b <tool_call>" + WEATHER + "</tool_call>", "<" * 9]
TEXTS.append(WEATHER + "\n\nI did.\nThen\n" + TIME + "\n" + WEATHER + "\n<b\n")
TEXTS += ["I use <tool_call> tags. " + WRITE + "\n" + WEATHER, "<think>" + WEATHER + "</think>\n" + WRITE, WRITE + TIME]
TEXTS += [
    '<tool_call>{"<tool_call>{"<tool_call>{"' + WRITE,
    "<think>\n" + WRITE,
    WEATHER.removesuffix("</tool_call>") + TIME,
]


def read(pieces: list[str], thinking: bool = False) -> tuple[str, list]:
    """Content and calls of a text that comes in pieces."""
    reader = CallParser(HERMES, NAMES, None, thinking)
    found = [each for i, piece in enumerate(pieces) for each in reader.read(piece, i == len(pieces) - 1)]
    calls = [call["function"] for each in found for call in each.get("tool_calls", ())]
    return "".join(each.get("content", "") for each in found), [(call["name"], call["arguments"]) for call in calls]


@pytest.mark.parametrize("text", TEXTS)
def test_the_pieces_do_not_matter(text, seed):
    draw = random.Random(seed)
    cuts = sorted(draw.sample(range(1, len(text)), 6))
    assert read([text[i:j] for i, j in zip([0, *cuts], [*cuts, None], strict=True)]) == read([text])
    assert read(list(text)) == read([text])


def test_a_tag_within_an_argument_is_a_part_of_it():
    content, ((name, arguments),) = read([WRITE])
    assert (content, name, json.loads(arguments)) == ("", "write", {"text": TRICKY})


@pytest.mark.parametrize(
    "prose", ["I use <tool_call> tags.", "<tool_call>{name}", "<tool_call>{'a': 1}", "<tool_call>[1]"]
)
def test_prose_about_tags_is_streamed_and_hides_no_call(prose):
    reader = CallParser(HERMES, NAMES)
    streamed = "".join(piece["content"] for char in prose + " " for piece in reader.read(char, False))
    assert streamed == prose + " "
    (piece,) = reader.read(WEATHER, False)
    assert piece["tool_calls"][0]["function"]["name"] == "weather"
    assert reader.finish_reason("stop") == "tool_calls"


def test_a_call_that_fails_late_hides_none_after_it():
    broken = '<tool_call>{"name": "weather", "arguments": {"city": "Ulm"}} or so </tool_call>'
    content, calls = read([broken + TIME])
    assert content == broken
    assert [name for name, _ in calls] == ["time"]


@pytest.mark.parametrize("thinking", [False, True])
def test_what_is_drafted_in_thoughts_is_not_called(thinking):
    thoughts = f"\nI could say {WEATHER}, or not.\n</think>\n\n"
    text = thoughts if thinking else "\n<think>" + thoughts
    content, calls = read(list(text + TIME), thinking)
    assert content == text
    assert [name for name, _ in calls] == ["time"]


def test_thoughts_without_an_end_have_no_calls():
    assert read(["hm " + WEATHER], thinking=True) == ("hm " + WEATHER, [])


def test_thoughts_are_streamed():
    reader = CallParser(HERMES, NAMES, thinking=True)
    assert [reader.read(text, False) for text in ("so", "</th", "eory")] == [
        [{"content": "so"}],
        [],
        [{"content": "</theory"}],
    ]


def test_the_word_think_in_an_answer_begins_no_thoughts():
    content, calls = read(["Say <think> first. " + WEATHER])
    assert (content, len(calls)) == ("Say <think> first. ", 1)


def test_line_breaks_within_a_text_are_read_as_they_are():
    _, ((_, arguments),) = read(['<tool_call>{"name": "write", "arguments": {"text": "a\nb"}}</tool_call>'])
    assert json.loads(arguments) == {"text": "a\nb"}


@pytest.mark.parametrize(
    ("prompt", "begun"),
    [("<A><think>\n", True), ("<A>", False), ("<A><think>\n\n</think>\n\n", False), ("<think> what is it?", False)],
)
def test_a_prompt_may_end_within_thoughts(prompt, begun):
    assert THINK.begins(prompt) is begun


def _value(draw: random.Random, depth: int):
    if depth == 0 or draw.random() < 0.3:
        return draw.choice([None, True, False, draw.random(), draw.randint(-9, 9), 'x"\\{}[]<', "", "\u2028ü"])
    if draw.random() < 0.5:
        return [_value(draw, depth - 1) for _ in range(draw.randint(0, 3))]
    return {f'k"{i}\\': _value(draw, depth - 1) for i in range(draw.randint(0, 3))}


def test_json_ends_where_pythons_own_reader_says(seed):
    draw = random.Random(seed)
    for _ in range(50):
        text = json.dumps({"a": _value(draw, 4)}, indent=draw.choice([None, 1]), ensure_ascii=draw.random() < 0.5)
        text += draw.choice(["", "}", " x", '"', "</tool_call>"])
        _, end = json.JSONDecoder().raw_decode(text)
        scanner = JsonScanner()
        ends = [scanner.end(text[:i]) for i in range(len(text) + 1)]
        assert ends == [None] * end + [end] * (len(text) + 1 - end)


@pytest.mark.parametrize("text", ["1", '"a"', "{1", "{}", "[]", "[1]", "no", '{"a": no', '{"a": Infinity', '{"a" <'])
def test_what_no_call_begins_with_is_seen_at_once(text):
    with pytest.raises(NoCallError):
        JsonScanner().end(text)


@pytest.mark.parametrize(
    "text", ['<tool_call>{"' * 300, ('<tool_call>{"' + "," * 999) * 3, ('<tool_call>[{"a' + " " * 999) * 3]
)
def test_each_character_is_looked_at_a_few_times_at_most(text, monkeypatch):
    looked = 0

    class Counting(JsonScanner):
        def end(self, text):
            nonlocal looked
            before = self._at
            try:
                return super().end(text)
            finally:
                looked += self._at - before

    monkeypatch.setattr(cursor, "JsonScanner", Counting)
    assert read(list(text)) == (text, [])
    assert looked <= 3 * len(text)


def test_forced_arguments_stream():
    reader = ForcedTool("f")
    first, second = [reader.read(piece, False)[0]["tool_calls"][0] for piece in ('{"a"', ": 1}")]
    assert first["function"] == {"name": "f", "arguments": '{"a"'}
    assert second == {"index": 0, "function": {"arguments": ": 1}"}}
    assert reader.read("", True) == []
