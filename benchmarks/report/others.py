"""JSON of no case: its records as tables, and the names of what is not shown."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from benchmarks.report.reading import Source
from benchmarks.report.tables import Cell, Judge, Table, number, origin_line

# Shown once a file, as where the numbers come from.
ELSEWHERE = ("environment", "machine")
WORDS = ("what", "note")


@dataclass
class Shown:
    """A file of another kind.

    Attributes:
        source: the file.
        about: its own words.
        origin: where its numbers come from.
        tables: its records.
        left: keys of lists that are no records, raw samples and curves.

    """

    source: Source
    about: str
    origin: str
    tables: list[Table] = field(default_factory=list)
    left: dict[str, None] = field(default_factory=dict)


def _is_scalar(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float | bool)


def _flat(record: dict[str, Any]) -> dict[str, Any]:
    """Its scalars, those of a nested object of scalars besides, under both names."""
    found = {}
    for key, value in record.items():
        if _is_scalar(value):
            found[key] = value
        elif _joins(value):
            found |= {f"{key} {inner}": v for inner, v in value.items()}
    return found


def _joins(value: Any) -> bool:
    return isinstance(value, dict) and bool(value) and all(_is_scalar(v) for v in value.values())


def records(node: Any, path: str, left: dict[str, None]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Objects that hold scalars, by where they lie; keys of other lists go to `left`."""
    if isinstance(node, list):
        if node and not all(isinstance(item, dict) for item in node):
            left[path] = None
            return
        for item in node:
            yield from records(item, path, left)
    elif isinstance(node, dict):
        own = any(_is_scalar(value) for value in node.values())
        if own:
            yield path, _flat(node)
        for key, value in node.items():
            if not _is_scalar(value) and not (own and _joins(value)):
                yield from records(value, f"{path}, {key}" if path else key, left)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return number(value)
    return "" if value is None else str(value)


def _table(key: str, found: list[tuple[str, dict[str, Any]]]) -> Table:
    if len(found) == 1:
        pairs: list[list[Cell]] = [[name, _cell(value)] for name, value in found[0][1].items()]
        return Table(key, ("name", "value"), pairs, text=2)
    columns = tuple(dict.fromkeys(name for _, record in found for name in record))
    rows: list[list[Cell]] = [[path, *(_cell(record.get(name)) for name in columns)] for path, record in found]
    return Table(key, ("of", *columns), rows)


def show(source: Source, judge: Judge) -> Shown:
    """Everything of the file that can be written as tables."""
    data = {key: value for key, value in source.data.items() if key not in ELSEWHERE}
    words = [data.pop(key) for key in WORDS if isinstance(data.get(key), str)]
    shown = Shown(source, " ".join(words), origin_line(source, judge, ()))
    facts = {key: value for key, value in data.items() if _is_scalar(value)}
    if facts:
        shown.tables.append(_table("the file's own facts", [("", facts)]))
    for key, value in data.items():
        if not _is_scalar(value) and (found := list(records(value, key, shown.left))):
            shown.tables.append(_table(key, [(path.removeprefix(f"{key}, "), record) for path, record in found]))
    return shown
