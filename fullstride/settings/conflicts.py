"""Settings that exclude each other, or that one alone is not enough of: declared beside the component that has them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, is_dataclass
from operator import attrgetter
from typing import Any

from fullstride.errors import ConfigError


@dataclass(frozen=True)
class Conflict:
    """A combination that cannot be.

    Attributes:
        shows: the keys that an error shows with their values, separated by spaces; a group shows its name.
        when: tells of a configuration whether it is this combination.
        remedy: what is expected instead; `{c.data.name}` in it is a value of the configuration.

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
    """Refuse a configuration.

    Raises:
        ConfigError: for the first of the conflicts that it has.

    """
    for conflict in conflicts:
        if conflict.when(config):
            received = " ".join(f"{key}={written(attrgetter(key)(config))}" for key in conflict.shows.split())
            raise ConfigError(f"{received}: expected {conflict.remedy.format(c=config)}")
