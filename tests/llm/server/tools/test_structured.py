import json

import openai
import pytest

HELLO = [{"role": "user", "content": "hello"}]
SCHEMA = {"type": "object", "properties": {"ä": {"type": "integer"}}}


def _format(schema: dict) -> dict:
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


@pytest.mark.parametrize(
    ("asked", "kind", "value"),
    [
        ({"response_format": {"type": "text"}}, None, None),
        ({"response_format": {"type": "json_object"}}, "json_object", ""),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            "json_schema",
            SCHEMA,
        ),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "json_object", ""),
        ({"regex": "a+"}, "regex", "a+"),
        ({"grammar": 'start: "a"'}, "grammar", 'start: "a"'),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", SCHEMA),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "json_schema", SCHEMA),
        ({"structured_outputs": {"json_object": True}}, "json_object", ""),
        ({"structured_outputs": {"regex": "b"}}, "regex", "b"),
        ({"structured_outputs": {"grammar": 'start: "b"'}}, "grammar", 'start: "b"'),
        ({"structured_outputs": {"choice": ['"yes"', "no"]}}, "grammar", 'start: "\\"yes\\"" | "no"'),
    ],
)
def test_every_way_to_ask_for_a_shape(client, live, asked, kind, value):
    client.chat.completions.create(model="fake", messages=HELLO, extra_body=asked)
    shape = live.engine.params[-1].structured_outputs
    if kind is None:
        assert shape is None
        return
    assert shape.kind == kind
    assert (json.loads(shape.value) if kind == "json_schema" else shape.value) == value


def test_completions_have_vllms_ways(client, live):
    client.completions.create(model="fake", prompt="x", extra_body={"regex": "a+"})
    assert live.engine.params[-1].structured_outputs.kind == "regex"


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"regex": "a", "grammar": "b"}, "grammar"),
        ({"response_format": {"type": "json_object"}, "regex": "b"}, "regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"regex": "ä" * 1001}, "regex"),
    ],
)
def test_one_shape_of_a_bounded_size(client, asked, param):
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="fake", messages=HELLO, extra_body=asked)
    assert refused.value.param == param
