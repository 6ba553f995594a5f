"""Validation against JSON schemas; runs confined, since references may make a small schema exponentially costly."""

import json
from collections.abc import Callable
from itertools import islice
from typing import Any

import jsonschema_rs

from fullstride.errors import ConfigError

MOST_ERRORS, MOST_CHARS = 10, 300
# Steps of one regular expression that looks around; far more than a text of JSON takes.
STEPS = 100_000


def validator(_: None) -> Callable[[tuple[str, str | None]], list[str]]:
    """Return a function from a schema and a text, both JSON, to the text's violations; of no text there are none."""
    return lambda asked: _violations(json.loads(asked[0]), asked[1])


def _violations(schema: Any, text: str | None) -> list[str]:
    """Return a JSON pointer and a message for each violation, such as `/tags: [7,7] has non-unique elements`.

    Raises:
        ConfigError: if it is not a schema.

    """
    options = jsonschema_rs.FancyRegexOptions(backtrack_limit=STEPS)
    try:
        compiled = jsonschema_rs.validator_for(
            schema, validate_formats=False, retriever=_refuse, pattern_options=options
        )
    except (ValueError, jsonschema_rs.ReferencingError) as error:
        raise ConfigError(f"it is not a JSON schema: {_line(str(error).partition('Failed validating')[0])}") from error
    if text is None:
        return []
    try:
        found = list(islice(compiled.iter_errors(json.loads(text)), MOST_ERRORS))
    except (ValueError, RecursionError) as error:
        return [_line(f": it cannot be checked: {error}")]
    paths = ("".join(f"/{part}" for part in error.instance_path) for error in found)
    return [_line(f"{path}: {error.message}") for path, error in zip(paths, found, strict=True)]


def _refuse(address: str) -> Any:
    """Reject remote references: nothing is fetched for a schema."""
    raise ValueError(f"{address} is not within the schema")


def _line(text: str) -> str:
    return " ".join(text.split())[:MOST_CHARS]
