"""`key=value` overrides of a configuration: split, parsed by the type of their field, and set; import paths."""

import importlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from fullstride.errors import ALIKE, ConfigError, one_line, one_of, similarity
from fullstride.settings.fields import Key


def is_import_path(name: str) -> bool:
    """Tell whether a name is an import path, and no name of a registry."""
    return re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", name) is not None


def load_object(path: str, key: str) -> Any:
    """The object at an import path.

    Args:
        path: `package.module:Name`.
        key: the setting that names it, for errors.

    Raises:
        ConfigError: if there is no such module, it cannot be imported, or it has no such attribute.

    """
    module, _, name = path.partition(":")
    try:
        found = importlib.import_module(module)
    except Exception as error:  # a stranger's module may raise anything
        missing = isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}.")
        remedy = "install it, or name its folder in PYTHONPATH" if missing else f"repair {module}"
        raise ConfigError(f"{key}={path}: expected an importable module ({one_line(error)}); {remedy}") from error
    if not hasattr(found, name):
        one_of(
            key, path, [f"{module}:{each}" for each in vars(found) if not each.startswith("_")] or [f"{module}:NAME"]
        )
    return getattr(found, name)


EXPECTED: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "text",
    int | str: "an integer or text",
    list[int]: "a list of integers such as [1,2]",
    list[float]: "a list of numbers such as [0.999,0.9999]",
    list[str]: "a list of names such as [a,b]",
}
ELEMENTS: dict[Any, type] = {list[int]: int, list[float]: float, list[str]: str}
BOOLEANS = {"true": True, "false": False}
OPENING, CLOSING, QUOTES = "([{", ")]}", "'\""


class Override(NamedTuple):
    """An override as it was given, the key that it sets, and the text of its value."""

    given: str
    key: str
    text: str


def split(overrides: Iterable[str], example: str, short: Mapping[str, str] | None = None) -> list[Override]:
    """Split overrides into keys and values.

    Args:
        overrides: each `key=value`.
        example: an override such as `epochs=20`, for errors.
        short: keys by their abbreviations.

    Raises:
        ConfigError: for one without `=`, or a key given twice.

    """
    found: dict[str, Override] = {}
    for given in overrides:
        name, equals, text = given.partition("=")
        if not equals:
            raise ConfigError(f"{given}: expected key=value, such as {example}")
        key = (short or {}).get(name, name)
        if key in found:
            raise ConfigError(f"{given}: {key} is given twice; expected it once")
        found[key] = Override(given, key, text)
    return list(found.values())


def parts(text: str) -> list[str]:
    """A text between its commas, without those inside of quotes or brackets."""
    found, depth, quote = [""], 0, ""
    for char in text:
        if quote:
            quote = "" if char == quote else quote
        elif char in QUOTES and not found[-1].strip():
            quote = char
        else:
            depth += (char in OPENING) - (char in CLOSING)
        if char == "," and depth == 0 and not quote:
            found.append("")
        else:
            found[-1] += char
    return [part.strip() for part in found]


def listed(text: str) -> list[str]:
    """The values that a sweep takes one by one, of `0,1`, `range(3)` or `choice(a,b)`; the text itself if it is one."""
    if match := re.fullmatch(r"range\((-?\d+(?:,-?\d+){0,2})\)", text):
        return [str(i) for i in range(*map(int, match[1].split(",")))]
    found = parts(text[7:-1] if text.startswith("choice(") and text.endswith(")") else text)
    return found if all(found) else [text]


def value_of(override: Override, key: Key) -> Any:
    """The value of an override of a field.

    Raises:
        ConfigError: for a text that is no value of the field's type, or one that it does not take.

    """
    try:
        value = _read(override.text, key.kind)
    except (KeyError, ValueError, TypeError):
        expected = EXPECTED.get(key.kind, str(key.kind))
        raise ConfigError(f"{override.given}: expected {expected}, got {override.text!r}") from None
    key.check(value)
    return value


def _read(text: str, kind: Any) -> Any:
    text = text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in QUOTES else text
    if kind is bool:
        return BOOLEANS[text.lower()]
    if kind == int | str:
        return int(text) if re.fullmatch(r"-?\d+", text) else text
    if kind not in ELEMENTS:
        return kind(text)
    if not (text.startswith("[") and text.endswith("]")):
        raise ValueError(text)
    return [_read(part, ELEMENTS[kind]) for part in parts(text[1:-1])] if text[1:-1].strip() else []


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested mappings by their dotted keys."""
    for name, value in values.items():
        yield from flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else [(prefix + name, value)]


def assign(config: Any, key: str, value: Any) -> None:
    """Set the field of a dotted name."""
    group, _, name = key.rpartition(".")
    setattr(attrgetter(group)(config) if group else config, name, value)


def nearest(key: str, names: Sequence[str], groups: Iterable[str] = ()) -> str:
    """The end of an error about an unknown key: the nearest ones by their whole or their last part, or what there is.

    Args:
        key: the key as given.
        names: names of all keys.
        groups: names of groups that are not keys; they are listed, and never suggested.

    """
    group, _, leaf = key.rpartition(".")
    scores = {name: max(similarity(key, name), similarity(leaf, name.rpartition(".")[2])) for name in names}
    if group:  # the one given is right until nothing in it is alike
        own = {name: score for name, score in scores.items() if name.startswith(f"{group}.") and score >= ALIKE}
        scores = own or scores
    best = max(scores.values())
    if best >= ALIKE:
        return f"; did you mean {' or '.join([name for name in scores if scores[name] == best][:2])}?"
    near = [name for name in names if group and name.startswith(f"{group}.")]
    return f"; expected one of {', '.join(near or [*(name for name in names if '.' not in name), *groups])}"
