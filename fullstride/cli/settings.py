"""Settings of the form `key=value` on the command line: their listing, and their completion by a shell."""

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from fullstride.errors import ConfigError
from fullstride.settings.fields import walk, written
from fullstride.settings.overrides import BOOLEANS

if TYPE_CHECKING:
    from rich.table import Table


class Setting(NamedTuple):
    """Row of a listing."""

    key: str
    default: str
    meaning: str


def settings_in(config: Any) -> list[Setting]:
    """Return the settings of a dataclass and of those in it, each with its names and its comment."""
    found = []
    for key in walk(config):
        group, _, name = key.name.rpartition(".")
        comment = _comments(type(attrgetter(group)(config) if group else config)).get(name, "")
        meaning = "; ".join(filter(None, (" | ".join(key.names), comment)))
        found.append(Setting(key.name, written(key.value), meaning))
    return found


def offers(config: Any) -> dict[str, list[str]]:
    """Return the values that a shell offers for each key: its names, or its default."""
    booleans = sorted(BOOLEANS)
    return {
        key.name: booleans if key.kind is bool else key.names or list(filter(None, [written(key.value)]))
        for key in walk(config)
    }


@functools.cache
def _comments(kind: type) -> dict[str, str]:
    source = "".join(inspect.getsource(each) for each in reversed(kind.__mro__) if is_dataclass(each))
    found = re.findall(r"^    (?:# (.*)\n    )?(\w+): [^\n]*?(?:  # (.*))?$", source, re.MULTILINE)
    return {name: after or above for above, name, after in found}


def plain_table(*columns: str) -> "Table":
    """Make a table without lines, of columns whose text is wrapped and never cut."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def print_table(table: "Table") -> None:
    """Print a table; a pipe or file gets one line for each row, however long."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, console.measure(table, options=console.options.update(width=1000)).maximum)
    console.print(table)


def show_settings(settings: Sequence[Setting], text: str) -> None:
    """Print the settings that have `text` in their key.

    Raises:
        ConfigError: if there are none.

    """
    shown = [setting for setting in settings if text in setting.key]
    if not shown:
        raise ConfigError(f"{text}: no key has this in its name; leave it out to list all")
    from rich.markup import escape

    table = plain_table("key", "default", "meaning")
    for setting in shown:
        table.add_row(*map(escape, setting))
    print_table(table)


def completing(choices: Callable[[], Mapping[str, Sequence[str]]]) -> Callable[..., list[str]]:
    """Make a completion of `key=value` arguments called `overrides`.

    Args:
        choices: gives the keys, each with values to offer.

    """

    def complete(ctx: typer.Context, incomplete: str) -> list[str]:
        known = choices()
        key, equals, _ = incomplete.partition("=")
        if equals:
            return [f"{key}={value}" for value in known.get(key, ())]
        before = list(ctx.params.get("overrides") or ())
        # bash splits words at the sign: `model=un` comes as `model`, `=`, `un`, and `model=` without its sign.
        if before[-1:] == ["="] or (before[-1:] and before[-1] in known and not incomplete):
            return list(known.get([word for word in before if word != "="][-1], ()))
        found = [name for name in known if name.startswith(incomplete)]
        # With its values next to it bash adds no space after the only name.
        values = [f"{found[0]}={value}" for value in known[found[0]]] if len(found) == 1 else []
        return [*(f"{name}=" for name in found), *values]

    return complete
