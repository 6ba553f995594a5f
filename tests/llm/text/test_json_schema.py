"""Schemas as pydantic and zod write them: what a grammar holds, no text breaks; the rest is named."""

import datetime
import decimal
import enum
import json
import logging
import pathlib
import re
import uuid
from typing import Annotated, Any, Literal

import jsonschema_rs
import llguidance
import numpy as np
import pydantic
import pytest

from fullstride.errors import ConfigError
from fullstride.llm.llm import _warn
from fullstride.llm.sampling_params import SamplingParams, Structured
from fullstride.llm.text.grammar import Compiler
from fullstride.llm.text.json_schema import NOT_HELD, PARTNERS, supported
from tests.llm.text.test_grammar import TOKENIZER, allowed


class Color(enum.Enum):
    RED, GREEN = "red", "green"


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]
    lives: pydantic.PositiveInt


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]
    name: str


# With the keywords that no grammar holds.
PYDANTIC: dict[str, tuple[Any, list[str]]] = {
    "path": (pathlib.Path, []),
    "secret": (pydantic.SecretStr, []),
    "bytes": (bytes, []),
    "base64": (pydantic.Base64Str, []),
    "pattern": (re.Pattern, []),
    "decimal": (decimal.Decimal, []),
    "network": (pydantic.IPvAnyNetwork, []),
    "postgres": (pydantic.PostgresDsn, []),
    "uuid4": (pydantic.UUID4, []),
    "set": (set[bool], ["uniqueItems"]),
    "enum keys": (dict[Color, bool], []),
    "literal keys": (dict[Literal["a", "b"], bool], []),
    "date keys": (dict[datetime.date, bool], []),
    "uuid keys": (dict[uuid.UUID, bool], []),
    "long keys": (dict[Annotated[str, pydantic.Field(min_length=2)], bool], ["propertyNames"]),
    "union": (Annotated[Cat | Dog, pydantic.Field(discriminator="kind")], ["oneOf"]),
    "extra": (
        Annotated[bool, pydantic.Field(json_schema_extra={"widget": "box"}, deprecated=True, examples=[True])],
        [],
    ),
}
# As zod 4's `toJSONSchema` writes them.
LOOKING = "^(?=[\\s\\S]*[a-f])[a-z]{1,9}$"
ZOD: dict[str, tuple[dict[str, Any], list[str]]] = {
    "record": (
        {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "boolean"}},
        [],
    ),
    "record of names": (
        {
            "type": "object",
            "propertyNames": {"type": "string", "enum": ["a", "b"]},
            "additionalProperties": {"type": "boolean"},
            "required": ["a", "b"],
        },
        [],
    ),
    # As pydantic-ai sends it on.
    "record beside properties": (
        {
            "type": "object",
            "properties": {"b": {"type": "null"}, "c": {}},
            "propertyNames": {"enum": ["a", "b"]},
            "additionalProperties": {"type": "boolean"},
        },
        [],
    ),
    "record beside no properties": (
        {
            "type": "object",
            "properties": {},
            "propertyNames": {"const": "k"},
            "additionalProperties": {"type": "boolean"},
        },
        [],
    ),
    "record of a pattern": (
        {
            "type": "object",
            "propertyNames": {"type": "string", "pattern": "^k_[a-z]{1,3}$"},
            "additionalProperties": {},
        },
        [],
    ),
    "email": ({"type": "string", "format": "email", "pattern": "^[a-z]{1,9}@[a-z]{1,9}\\.[a-z]{2,3}$"}, []),
    "look-ahead": ({"type": "string", "format": "emoji", "pattern": LOOKING}, ["pattern"]),
    "file": ({"type": "string", "format": "binary", "contentEncoding": "binary", "maxLength": 9}, []),
    "float32": ({"type": "number", "minimum": -3.4028234663852886e38, "maximum": 3.4}, ["minimum"]),
    "never": ({"type": "object", "properties": {"a": {"not": {}}, "b": {"type": "boolean"}}, "required": ["b"]}, []),
    "xor": ({"oneOf": [{"type": "string", "maxLength": 9}, {"type": "string", "maxLength": 3}]}, ["oneOf"]),
    "tuple": (
        {"type": "array", "prefixItems": [{"type": "boolean"}], "items": False, "minItems": 1, "maxItems": 1},
        [],
    ),
    "conditions": (
        {
            "type": "object",
            "properties": {"a": {"type": "boolean"}, "not": {"type": "boolean"}},
            "if": {"required": ["a"]},
            "then": {"required": ["not"]},
            "else": False,
            "minProperties": 1,
        },
        ["if", "minProperties"],
    ),
}


def _pydantic(kind: Any) -> dict[str, Any]:
    return pydantic.create_model("Asked", f=(kind, ...)).model_json_schema()


CASES = {name: (_pydantic(kind), left) for name, (kind, left) in PYDANTIC.items()} | {
    f"zod {name}": ({"type": "object", "properties": {"f": schema}, "required": ["f"]}, left)
    for name, (schema, left) in ZOD.items()
}


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return Compiler(TOKENIZER)


def _text(compiler: Compiler, schema: Any, rng: np.random.Generator) -> str:
    """A text that the grammar lets pass; at half of its places it ends what it can end."""
    matcher, ids = compiler.matcher(Structured("json_schema", json.dumps(schema))), []
    while not matcher.done:
        may = allowed(matcher).tolist()
        ends = [token for token in may if TOKENIZER.token_bytes(token)[:1] in (b'"', b"}", b"]", b",")]
        ids.append(int(rng.choice(ends if ends and rng.random() < 0.5 else may)))
        assert matcher.advance(ids[-1])
    return TOKENIZER.decode(ids)


def _finite(number: str) -> float:
    return max(-1e308, min(float(number), 1e308))


@pytest.mark.parametrize("name", CASES)
def test_no_text_breaks_what_a_grammar_holds(compiler, name, seed):
    schema, left = CASES[name]
    made = supported(schema)
    assert sorted(where.rpartition("/")[2] for where in made.left_out) == sorted(left)
    assert all(where.startswith("/properties/f/") for where in made.left_out)
    rng = np.random.default_rng(seed)
    grammars = json.loads(json.dumps(made.schema).replace('"oneOf"', '"anyOf"'))
    holds = jsonschema_rs.validator_for(grammars if left else schema, validate_formats=False)
    texts = [_text(compiler, schema, rng) for _ in range(4)]
    assert all(holds.is_valid(json.loads(text, parse_float=_finite)) for text in texts), texts


@pytest.mark.parametrize("name", ["enum keys", "zod record of a pattern"])
def test_names_of_properties_are_held(compiler, name):
    matcher = compiler.matcher(Structured("json_schema", json.dumps(CASES[name][0])))
    for token in TOKENIZER.encode('{"f": {"'):
        assert matcher.advance(token)
    assert not matcher.advance(TOKENIZER.encode("x")[0])
    assert matcher.advance(TOKENIZER.encode("r" if "enum" in name else "k")[0])


# The keywords of 2020-12 that assert something, each with a value that does.
ASSERTIONS = {
    "allOf": [{"type": "string"}], "anyOf": [{"type": "string"}], "oneOf": [{"type": "string"}, {"type": "null"}],
    "not": {"const": 1}, "if": {}, "then": {}, "else": {}, "dependentSchemas": {"a": {}}, "prefixItems": [{}],
    "items": {}, "contains": {}, "properties": {"a": {}}, "patternProperties": {"a": {}}, "additionalProperties": False,
    "propertyNames": {"minLength": 2}, "unevaluatedItems": False, "unevaluatedProperties": False, "type": "string",
    "enum": ["a"], "const": "a", "multipleOf": 2, "maximum": 5, "exclusiveMaximum": 5, "minimum": 5,
    "exclusiveMinimum": 5,
    "maxLength": 5, "minLength": 5, "pattern": "a", "maxItems": 5, "minItems": 5, "uniqueItems": True, "maxContains": 5,
    "minContains": 5, "maxProperties": 5, "minProperties": 5, "required": ["a"], "dependentRequired": {"a": ["b"]},
    "$dynamicRef": "#a",
}  # fmt: skip


@pytest.mark.parametrize("keyword", ASSERTIONS)
def test_what_llguidance_passes_over_is_known(keyword):
    grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps({keyword: ASSERTIONS[keyword]}))
    passed_over = "Unimplemented keys" in llguidance.LLMatcher.validate_grammar(grammar)
    assert passed_over is (keyword in NOT_HELD or keyword in PARTNERS)


@pytest.mark.parametrize(
    ("pattern", "looks"), [(r"a(?=b)", 1), (r"\\b", 0), (r"\bx", 1), (r"(?<n>a)(?:b)", 0), (r"(a)\1", 1)]
)
def test_expressions_that_look_around_are_known(pattern, looks):
    assert bool(supported({"pattern": pattern}).left_out) is bool(looks)


@pytest.mark.parametrize(
    ("items", "most", "expected"),
    [
        ({"enum": ["a", "b", "c"]}, None, 3),
        ({"$ref": "#/$defs/c"}, 9, 2),
        ({"type": "boolean"}, 1, 1),
        ({}, None, None),
    ],
)
def test_an_array_has_no_more_unlike_items_than_there_are(items, most, expected):
    schema = {"items": items, "uniqueItems": True, "$defs": {"c": {"enum": [1, 2]}}} | (
        {"maxItems": most} if most else {}
    )
    assert supported(schema).schema.get("maxItems") == expected
    assert supported(schema).left_out == ["/uniqueItems"]


def test_what_asks_for_nothing_is_held():
    assert supported({"uniqueItems": False, "unevaluatedProperties": True, "propertyNames": {}}).left_out == []


def test_names_within_a_schema_are_no_keywords():
    schema = {
        "properties": {"not": {"type": "string"}, "if": {}},
        "required": ["not", "if"],
        "enum": [{"uniqueItems": 1}],
    }
    assert supported(schema).schema == schema


def test_what_cannot_be_met_is_refused(compiler):
    with pytest.raises(ConfigError, match="Unsatisfiable"):
        compiler.matcher(Structured("json_schema", json.dumps(_required({"not": {}}))))


def _required(schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"f": schema}, "required": ["f"]}


def test_python_is_told_what_is_left_out(caplog):
    shape = Structured("json_schema", json.dumps(_required({"type": "array", "uniqueItems": True})))
    with caplog.at_level(logging.WARNING):
        _warn(
            [SamplingParams(structured_outputs=shape)] * 3
            + [SamplingParams(), SamplingParams(structured_outputs=Structured("json_object"))]
        )
    (message,) = caplog.messages
    assert "/properties/f/uniqueItems" in message
