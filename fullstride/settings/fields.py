"""Types of a configuration's fields, each with its allowed values on its own line; conflicts between fields.

lr: Positive = 1e-4
decay: Annotated[str, Names(("constant", "cosine"))] = "constant"
"""

import math
import typing
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from operator import attrgetter
from typing import Annotated, Any, NamedTuple

from fullstride.errors import ConfigError, one_of
from fullstride.runs.atomic_files import is_folder_name


@dataclass(frozen=True)
class Rule:
    """Requirement on a value, in words and as a predicate, which NaN must fail."""

    expected: str
    holds: Callable[[Any], bool]

    def check(self, key: str, value: Any) -> None:
        """Raise ConfigError unless the value fits."""
        if not self.holds(value):
            raise ConfigError(f"{key}={value}: expected {self.expected}")


@dataclass(frozen=True)
class AllowedNames:
    """Names of which a value must be one."""

    names: Iterable[str]

    def check(self, key: str, value: Any) -> None:
        """Raise ConfigError, with the nearest name, unless the value is one of them."""
        one_of(key, value, self.names)


LATER = "later"  # marks a field that was added after runs had been named by the values of all fields

_NATURAL = Rule("a finite number, at least 0", lambda x: 0 <= x < math.inf)
Share = Annotated[float, Rule("a share in [0, 1]", lambda x: 0 <= x <= 1)]
PartShare = Annotated[float, Rule("a share above 0 and below 1", lambda x: 0 < x < 1)]
BelowOne = Annotated[float, Rule("a number in [0, 1)", lambda x: 0 <= x < 1)]
Finite = Annotated[float, Rule("a finite number", math.isfinite)]
Positive = Annotated[float, Rule("a finite number above 0", lambda x: 0 < x < math.inf)]
NotNegative = Annotated[float, _NATURAL]
Natural = Annotated[int, _NATURAL]
Count = Annotated[int, Rule("at least 1", lambda x: x >= 1)]
Counts = Annotated[list[int], Rule("at least one number, each at least 1", lambda xs: len(xs) > 0 and min(xs) >= 1)]
Seed = Annotated[int, Rule("a number from 0 to 2^32 - 1", lambda x: 0 <= x < 2**32)]
FolderName = Annotated[str, Rule("a folder's name, without / \\ or ..", is_folder_name)]
FolderPath = Annotated[str, Rule("a folder's path; . for this one", lambda x: bool(x.strip()))]


class Key(NamedTuple):
    """A field of a configuration or of a group in it: dotted name, type, rules and value; whether it is `LATER`."""

    name: str
    kind: Any
    rules: tuple["Rule | AllowedNames", ...]
    value: Any
    later: bool = False

    @property
    def names(self) -> list[str]:
        """Names of which the value must be one; none if any text or number will do."""
        return [name for rule in self.rules if isinstance(rule, AllowedNames) for name in rule.names]

    def check(self, value: Any) -> None:
        """Raise ConfigError unless the field takes the value."""
        for rule in self.rules:
            rule.check(self.name, value)


def walk(config: Any, prefix: str = "") -> Iterator[Key]:
    """Every field of a configuration, those of its groups by dotted names."""
    hints = typing.get_type_hints(type(config), include_extras=True)
    for field in (each for each in fields(config) if each.init):
        name, value, hint = prefix + field.name, getattr(config, field.name), hints[field.name]
        if is_dataclass(value):
            yield from walk(value, f"{name}.")
        elif typing.get_origin(hint) is Annotated:
            kind, *marks = typing.get_args(hint)
            yield Key(name, kind, tuple(mark for mark in marks if mark is not LATER), value, LATER in marks)
        else:
            yield Key(name, hint, (), value)


def check(config: Any) -> None:
    """Check each value of a configuration by itself.

    Raises:
        ConfigError: for the first impossible one: its key, what was received, what is expected.

    """
    for key in walk(config):
        key.check(key.value)


@dataclass(frozen=True)
class Conflict:
    """A combination of settings that cannot work.

    Attributes:
        shows: the keys that an error shows with their values, separated by spaces; a group shows its name.
        when: predicate of a configuration that has this combination.
        remedy: the expected settings instead; `{c.data.name}` in it is a value of the configuration.

    """

    shows: str
    when: Callable[[Any], bool]
    remedy: str


def written(value: Any) -> str:
    """Format a value as the command line takes it."""
    if isinstance(value, list):
        return f"[{','.join(map(written, value))}]"
    if is_dataclass(value):
        return str(getattr(value, "name", ""))
    return str(value).lower() if isinstance(value, bool) else str(value)


def refuse(conflicts: Iterable[Conflict], config: Any) -> None:
    """Raise if a configuration has a conflict.

    Raises:
        ConfigError: for the first of the conflicts that it has.

    """
    for conflict in conflicts:
        if conflict.when(config):
            received = " ".join(f"{key}={written(attrgetter(key)(config))}" for key in conflict.shows.split())
            raise ConfigError(f"{received}: expected {conflict.remedy.format(c=config)}")
