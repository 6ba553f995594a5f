"""Checks of texts against what no grammar enforces of their schemas, and the rejected part of a schema."""

import contextlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from fullstride.errors import ConfigError
from fullstride.llm.sampling_params import Structured
from fullstride.llm.server.errors import BadRequestError, refusing
from fullstride.llm.server.streaming import merge
from fullstride.llm.server.tools.parsers import ToolParser
from fullstride.llm.text.confined import IsolatedFunction, TooCostlyError
from fullstride.llm.text.json_schema import DEFINITIONS, children, supported

# Says what is wrong with a text, and whether it is whole: not cut off by a limit of tokens.
Check = Callable[[str, bool], list[str]]
MOST_PATH = 100
# For finding the part of a schema that is refused: how many are compiled, and when to stop.
ATTEMPTS, SECONDS = 64, 2.0
# Schemas that people write take milliseconds.
_violations = IsolatedFunction("fullstride.llm.server.tools.validation:validator", seconds=0.25, memory=256 << 20)


@dataclass(frozen=True)
class CallSchemas:
    """Calls that a text may have.

    Attributes:
        reader: makes a parser that finds them.
        schemas: of their arguments, by the functions' names.
        enforced: names of functions whose arguments a grammar constrains.

    """

    reader: Callable[[], ToolParser]
    schemas: Mapping[str, Any]
    enforced: frozenset[str]

    def found(self, text: str) -> list[dict[str, str]]:
        """Return the name and arguments of each call in a text."""
        calls: dict[int, Any] = {}
        for piece in self.reader().read(text, last=True):
            for call in piece.get("tool_calls", ()):
                calls[call["index"]] = merge(calls.get(call["index"]), call["function"])
        return list(calls.values())


@dataclass
class Checker:
    """Check of one response's texts: of their calls, or if they have none, of the whole text.

    Attributes:
        schema: of a whole text, as JSON, if a grammar does not enforce all of it.
        calls: that a text may have.
        arguments: schemas to check, as JSON, by the functions' names.

    """

    schema: str | None
    calls: CallSchemas | None
    arguments: Mapping[str, str]
    _failed: str = field(default="", init=False)

    def __call__(self, text: str, whole: bool) -> list[str]:
        """Return what is wrong."""
        errors: list[str] = []
        calls = self.calls.found(text) if self.calls else []
        for i, call in enumerate(calls):
            schema, arguments = self.arguments.get(call["name"]), call["arguments"]
            if schema is not None and (whole or _is_json(arguments)):
                errors += self._errors(f"tool_calls.{i}.function.arguments", schema, arguments)
        if not calls and whole and self.schema is not None:
            errors = self._errors("", self.schema, text)
        return errors

    def _errors(self, place: str, schema: str, text: str) -> list[str]:
        if not self._failed:
            try:
                found = _violations((schema, text))
                return [(place or "the whole" * error.startswith(":")) + error for error in found]
            except ConfigError as error:
                # What is too costly once is not tried again: each time delays the checks of others.
                self._failed = str(error)
        return [f"{place or 'the whole'}: it cannot be checked: {self._failed}"]


def check_of(shape: Structured | None, calls: CallSchemas | None) -> Check | None:
    """Return the check of a response's texts; None if a grammar enforces all of it.

    Args:
        shape: that a text without calls must have.
        calls: that a text may have.

    Raises:
        ConfigError: if a schema is none, or costs too much.

    """
    own = shape.value if shape is not None and shape.kind == "json_schema" and _left_out(shape.value) else None
    if own is not None:
        _is_schema(own)
    arguments: dict[str, str] = {}
    for name, schema in calls.schemas.items() if calls else ():
        written = json.dumps(schema)
        if calls and name in calls.enforced and not _left_out(written):
            continue
        try:
            _is_schema(written)
        except ConfigError as error:
            raise ConfigError(f"tool '{name}': {error}") from error
        arguments[name] = written
    return Checker(own, calls, arguments) if own is not None or arguments else None


@lru_cache(maxsize=256)  # a conversation sends its tools again with each turn
def _is_schema(schema: str) -> None:
    _violations((schema, None))


def _left_out(schema: str) -> bool:
    return bool(supported(json.loads(schema)).left_out)


def _is_json(text: str) -> bool:
    return _read(text) is not None


def _read(text: str) -> Any:
    """Parse JSON; None if it is invalid."""
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(text)
    return None


def refused(
    error: ConfigError,
    param: str,
    shape: Structured | None,
    schemas: Mapping[str, Any],
    compiled: Callable[[Structured], Any],
) -> BadRequestError:
    """Return the error of a rejected constraint: which tool, which part of the schema, and why.

    Args:
        error: of the whole shape.
        param: that asks for it.
        shape: what was refused; None if no grammar was compiled.
        schemas: of arguments, by the functions' names, and of a text without calls, by an empty name; None is none.
        compiled: compiles a shape.

    """
    if isinstance(error, TooCostlyError) or shape is None:
        return refusing(error, param)
    for name, schema in schemas.items():
        if schema is not None and (found := _refused_part(schema, compiled)) is not None:
            path, why = found
            path = path if len(path) <= MOST_PATH else f"...{path[-MOST_PATH:]}"
            where = " at ".join(filter(None, (f"tool '{name}'" * bool(name), path)))
            reason = str(why).removeprefix("json_schema is not accepted: ")
            return BadRequestError(f"Invalid '{param}': {where}{': ' * bool(where)}{reason}", param=param)
    if shape.kind == "grammar" and (tools := schemas.keys() - {""}):
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
