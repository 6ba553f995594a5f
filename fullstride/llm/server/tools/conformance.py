"""Checks of a whole text against schema parts that no grammar enforces, and the rejected part of a schema."""

import contextlib
import json
import time
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

import jsonschema_rs

from fullstride.errors import ConfigError
from fullstride.llm.sampling_params import Structured
from fullstride.llm.server.errors import BadRequestError, refusing
from fullstride.llm.text.confined import TooCostlyError
from fullstride.llm.text.json_schema import DEFINITIONS, children, supported

# Says what is wrong with a whole text.
Check = Callable[[str], list[str]]
MOST_ERRORS, MOST_CHARS, MOST_PATH = 10, 300, 100
# Steps of one regular expression that looks around; far more than a text of JSON takes.
STEPS = 100_000
# For finding the part of a schema that is refused: how many are compiled, and when to stop.
ATTEMPTS, SECONDS = 64, 2.0


def check_of(shape: Structured, tools: Mapping[str, Any]) -> Check | None:
    """Return the check of a whole text under this constraint; None if a grammar enforces all of it.

    Args:
        shape: of the text.
        tools: schemas of arguments by the functions' names, if the text is a call.

    Raises:
        ConfigError: if a schema is none.

    """
    if shape.kind == "json_schema":
        return _check(json.loads(shape.value))
    checks = {name: found for name, schema in tools.items() if (found := _check(schema)) is not None}

    def check(text: str) -> list[str]:
        call = _read(text)
        return checks[call["name"]](json.dumps(call["arguments"])) if call and call["name"] in checks else []

    return check if checks else None


def _check(schema: Any) -> Check | None:
    if not supported(schema).left_out:
        return None
    options = jsonschema_rs.FancyRegexOptions(backtrack_limit=STEPS)
    try:
        validator = jsonschema_rs.validator_for(
            schema, validate_formats=False, retriever=_refuse, pattern_options=options
        )
    except (ValueError, jsonschema_rs.ReferencingError) as error:
        raise ConfigError(f"it is not a JSON schema: {_line(str(error).partition('Failed validating')[0])}") from error

    def check(text: str) -> list[str]:
        try:
            found = list(islice(validator.iter_errors(json.loads(text)), MOST_ERRORS))
        except (ValueError, RecursionError) as error:
            return [_line(f"the whole: it cannot be checked: {error}")]
        paths = ("".join(f"/{part}" for part in error.instance_path) for error in found)
        return [_line(f"{path or 'the whole'}: {error.message}") for path, error in zip(paths, found, strict=True)]

    return check


def _read(text: str) -> Any:
    """Parse JSON; None if it is invalid."""
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(text)
    return None


def _refuse(address: str) -> Any:
    """Reject remote references: nothing is fetched for a schema."""
    raise ValueError(f"{address} is not within the schema")


def _line(text: str) -> str:
    return " ".join(text.split())[:MOST_CHARS]


def refused(
    error: ConfigError, param: str, shape: Structured, tools: Mapping[str, Any], compiled: Callable[[Structured], Any]
) -> BadRequestError:
    """Return the error of a rejected constraint: which tool, which part of the schema, and why.

    Args:
        error: of the whole shape.
        param: that asks for it.
        shape: what was refused.
        tools: see `check_of`.
        compiled: compiles a shape.

    """
    if isinstance(error, TooCostlyError):
        return refusing(error, param)
    schemas = tools or ({"": _read(shape.value)} if shape.kind == "json_schema" else {})
    for name, schema in schemas.items():
        if (found := _refused_part(schema, compiled)) is not None:
            path, why = found
            path = path if len(path) <= MOST_PATH else f"...{path[-MOST_PATH:]}"
            where = " at ".join(filter(None, (f"tool '{name}'" * bool(name), path)))
            reason = str(why).removeprefix("json_schema is not accepted: ")
            return BadRequestError(f"Invalid '{param}': {where}{': ' * bool(where)}{reason}", param=param)
    if shape.kind == "grammar" and tools:
        message = f"Invalid '{param}': the schemas of {len(tools)} tools are too large for one grammar; send fewer."
        return BadRequestError(message, param=param)
    return refusing(error, param)


def _refused_part(schema: Any, compiled: Callable[[Structured], Any]) -> tuple[str, ConfigError] | None:
    """Find the smallest part of a schema that is rejected by itself, as a JSON pointer, and why; None if none is."""
    tries, end = iter(range(ATTEMPTS)), time.monotonic() + SECONDS
    definitions = {key: schema[key] for key in DEFINITIONS if isinstance(schema, dict) and key in schema}

    def smallest(path: str, part: Any) -> tuple[str, ConfigError] | None:
        if next(tries, None) is None or time.monotonic() > end:
            return None
        try:
            compiled(Structured("json_schema", json.dumps(definitions | part if isinstance(part, dict) else {})))
        except ConfigError as error:
            deeper = (smallest(path + more, each) for more, each in children(part))
            return next(filter(None, deeper), None) or (path, error)
        return None

    return smallest("", schema)
