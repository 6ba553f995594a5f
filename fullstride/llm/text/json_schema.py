"""Parts of JSON schemas that a grammar can enforce, and the parts that it cannot.

By JSON Schema 2020-12 formats, and keywords that it does not know, are annotations: they are let pass. llguidance holds
most other keywords. A text can break the ones listed here, and has to be looked at when it is whole.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Keywords by what they hold: schemas by name, schemas in a list, or a schema.
NAMED = frozenset(("properties", "patternProperties", "$defs", "definitions"))
DEFINITIONS = frozenset(("$defs", "definitions"))
LISTED = frozenset(("allOf", "anyOf", "oneOf", "prefixItems", "items"))
SINGLE = frozenset(("items", "additionalProperties", "additionalItems"))
# What llguidance passes over, each with the values that ask for nothing.
NOT_HELD: dict[str, tuple[Any, ...]] = {
    "$dynamicRef": (),
    "$recursiveRef": (),
    "contains": (),
    "dependencies": ({},),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "if": (),
    "not": (),
    "propertyNames": (True, {}),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "uniqueItems": (False,),
}
# These say nothing without the one above that they belong to.
PARTNERS = frozenset(("then", "else", "minContains", "maxContains"))
# Of regular expressions: what looks around, or back to what was matched.
LOOKS = re.compile(r"(?<!\\)(?:\\\\)*(?:\(\?<?[=!]|\\[bB1-9k])")
BOUNDS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"))
# Bounds of numbers that are not whole fit into 64 bits.
MOST = 2**63
ANNOTATIONS = frozenset(("title", "description", "default", "examples", "deprecated", "$comment", "format"))


@dataclass
class SupportedSchema:
    """Part of a schema that a grammar can enforce.

    Attributes:
        schema: the schema without the parts that a grammar cannot enforce.
        left_out: JSON pointers to these parts, such as `/properties/tags/uniqueItems`.

    """

    schema: Any
    left_out: list[str]


def supported(schema: Any) -> SupportedSchema:
    """Split a schema.

    Args:
        schema: as `json.loads` returns it.

    """
    left_out: list[str] = []
    return SupportedSchema(_part(schema, "", schema, left_out), left_out)


def children(schema: Any) -> list[tuple[str, Any]]:
    """Yield the direct subschemas, each with its path from there; definitions come last."""
    found: list[tuple[str, Any]] = []
    own = schema.items() if isinstance(schema, dict) else ()
    for key, value in sorted(own, key=lambda item: item[0] in DEFINITIONS):
        if key in NAMED and isinstance(value, dict):
            found += [(f"/{key}/{_escaped(name)}", each) for name, each in value.items()]
        elif key in LISTED and isinstance(value, list):
            found += [(f"/{key}/{i}", each) for i, each in enumerate(value)]
        elif key in SINGLE:
            found.append((f"/{key}", value))
    return found


def _part(schema: Any, path: str, root: Any, left_out: list[str]) -> Any:
    if not isinstance(schema, dict):
        return schema
    if schema.get("not") in ({}, True):
        return False
    made = _bounded(_without_names(schema, root), root)
    for key in [key for key in made if _is_left_out(key, made)]:
        del made[key]
        left_out.append(f"{path}/{key}")
    if "oneOf" in made:
        left_out.append(f"{path}/oneOf")  # held as anyOf where a text may be of several
    for key in NAMED & made.keys():
        if isinstance(made[key], dict):
            made[key] = _named(made[key], key, f"{path}/{key}", root, left_out)
    for key in LISTED & made.keys():
        if isinstance(made[key], list):
            made[key] = [_part(each, f"{path}/{key}/{i}", root, left_out) for i, each in enumerate(made[key])]
    for key in SINGLE & made.keys():
        made[key] = _part(made[key], f"{path}/{key}", root, left_out)
    return made


def _named(schemas: Mapping[str, Any], key: str, path: str, root: Any, left_out: list[str]) -> dict[str, Any]:
    made = {}
    for name, each in schemas.items():
        where = f"{path}/{_escaped(name)}"
        if key == "patternProperties" and LOOKS.search(name):
            left_out.append(where)
        else:
            made[name] = _part(each, where, root, left_out)
    return made


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _is_left_out(key: str, schema: Mapping[str, Any]) -> bool:
    value = schema[key]
    if key in NOT_HELD:
        return not any(type(value) is type(neutral) and value == neutral for neutral in NOT_HELD[key])
    if key == "pattern":
        return isinstance(value, str) and bool(LOOKS.search(value))
    if key in BOUNDS:
        return _is_number(value) and abs(value) >= MOST and schema.get("type") != "integer"
    if key in ("minProperties", "maxProperties"):
        properties, required = schema.get("properties"), schema.get("required")
        required = set(required) if isinstance(required, list) else set()
        return isinstance(properties, dict) and not properties.keys() <= required
    return False


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _without_names(schema: Mapping[str, Any], root: Any) -> dict[str, Any]:
    """Return a copy that expresses `propertyNames` by keywords that a grammar can enforce, if possible."""
    made = {key: value for key, value in schema.items() if key not in PARTNERS}
    names = resolved(made.get("propertyNames"), root)
    if not isinstance(names, dict):
        return made
    asked = {key: value for key, value in names.items() if key not in ANNOTATIONS}
    if asked.get("type") == "string":
        del asked["type"]
    rest, own = made.get("additionalProperties", True), made.get("properties") or {}
    free = isinstance(own, dict) and not made.get("patternProperties")
    if "const" in asked:
        asked["enum"] = [asked.pop("const")]
    if not asked:
        del made["propertyNames"]
    elif free and asked.keys() == {"enum"} and isinstance(asked["enum"], list):
        texts = [name for name in asked["enum"] if isinstance(name, str)]
        made |= {"properties": {name: own.get(name, rest) for name in texts}, "additionalProperties": False}
        del made["propertyNames"]
    elif free and not own and asked.keys() == {"pattern"} and isinstance(asked["pattern"], str):
        made |= {"patternProperties": {asked["pattern"]: rest}, "additionalProperties": False}
        del made["propertyNames"]
    return made


def _bounded(schema: dict[str, Any], root: Any) -> dict[str, Any]:
    """With no more unlike items than there are values; a small model may otherwise go on for ever."""
    items = resolved(schema.get("items"), root)
    values = None
    if isinstance(items, dict):
        values = items.get("enum") or ([0, 1] if items.get("type") == "boolean" else None)
    if schema.get("uniqueItems") is not True or not isinstance(values, list) or "prefixItems" in schema:
        return schema
    most = schema.get("maxItems", len(values))
    return schema | {"maxItems": min(most, len(values)) if _is_number(most) else most}


def resolved(schema: Any, root: Any) -> Any:
    """Follow a reference within the schema, if it is one."""
    if not (isinstance(schema, dict) and str(schema.get("$ref", "")).startswith("#/") and len(schema) == 1):
        return schema
    for name in schema["$ref"][2:].split("/"):
        root = root.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(root, dict) else None
    return root
