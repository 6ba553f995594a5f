"""Settings from the command line, `KEY=VALUE` each, for a dataclass that has a default for every key."""

from dataclasses import fields
from typing import Any, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError

from fullstride.errors import ConfigError, one_of

T = TypeVar("T")


def parsed(option: str, kind: type[T], given: list[str]) -> T:
    """An instance of the dataclass with what was given in place of its defaults.

    Raises:
        ConfigError: for a key that it does not have, or a value that is not of the key's type.

    """
    hints = get_type_hints(kind)
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for item in given:
        key, equals, text = item.partition("=")
        if not equals:
            raise ConfigError(f"{option} {item}: expected KEY=VALUE, with one of the keys {', '.join(names)}")
        one_of(option, key, names)
        values[key] = _value(f"{option} {item}", hints[key], text)
    return kind(**values)


def _value(what: str, hint: Any, text: str) -> Any:
    try:
        return TypeAdapter(hint).validate_strings(text)
    except ValidationError as error:
        raise ConfigError(f"{what}: {error.errors()[0]['msg'].lower()}") from None
