import pytest
from pydantic import TypeAdapter, ValidationError

from fullstride.llm.server.messages import template_messages
from fullstride.llm.server.schemas.messages import Message


def _made(*messages: dict) -> list[dict]:
    return template_messages(TypeAdapter(list[Message]).validate_python(list(messages)))


def test_calls_have_their_arguments_as_values():
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": [1, "ä"]}'}}
    empty = {"id": "d", "function": {"name": "g", "arguments": ""}}
    (made,) = _made({"role": "assistant", "content": None, "tool_calls": [call, empty]})
    assert made["content"] is None
    assert [each["function"] for each in made["tool_calls"]] == [
        {"name": "f", "arguments": {"x": [1, "ä"]}},
        {"name": "g", "arguments": {}},
    ]


def test_arguments_have_whole_characters():
    text = r'{"half": "\ud800!", "\udfff": "\ud83c\udf89 \u00e9"}'
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": text}}
    (made,) = _made({"role": "assistant", "content": None, "tool_calls": [call]})
    assert made["tool_calls"][0]["function"]["arguments"] == {"half": "\ufffd!", "\ufffd": "🎉 é"}


def test_what_was_thought_is_shown_again():
    assert _made({"role": "assistant", "content": "5", "reasoning_content": "2 + 3", "annotations": []}) == [
        {"role": "assistant", "content": "5", "reasoning_content": "2 + 3"}
    ]


def test_names_and_roles():
    made = _made(
        {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "n"},
        {"role": "tool", "tool_call_id": "c", "content": "7"},
    )
    assert made == [
        {"role": "system", "content": "a\nb", "name": "n"},
        {"role": "tool", "content": "7", "tool_call_id": "c"},
    ]


@pytest.mark.parametrize("value", [False, 0, "", {}])
def test_what_is_no_list_of_calls_is_refused(value):
    with pytest.raises(ValidationError, match="tool_calls"):
        _made({"role": "assistant", "content": "5", "tool_calls": value})
    assert _made({"role": "assistant", "content": "5", "tool_calls": [], "refusal": "", "audio": None})
