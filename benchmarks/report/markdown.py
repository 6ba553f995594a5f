"""Tables of results inside Markdown: between two comments, written by a command, and checked by a test."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.report.reading import UNKNOWN, Folder, Measurement, Result, Source
from fullstride.errors import ConfigError, similarity
from fullstride.runs.atomic_files import replace_file

# What makes a table's Markdown, by its name, of a machine's results or, of "", of any; only those that a page has are
# made.
Tables = Mapping[str, Callable[..., str]]
BEGIN, END = r"<!-- table: ([\w-]+)(?: of ([\w-]+))? -->", "<!-- end of table -->"
PLACE = re.compile(rf"({BEGIN}[ \t]*\n).*?({END})", re.DOTALL)
# Conditions of results of other settings than the usual ones, whose numbers a table has where it asks for them.
UNUSUAL: Mapping[str, Any] = {"step": None, "at": None, "kv_cache_dtype": None}
# Names that a message about a missing row lists: there may be hundreds.
NEAREST = 12
# A line that is meant to be one of the two.
MARK = re.compile(r"^[ \t]*(<!--[ \t]*(?:table|end of table)\b.*)$", re.MULTILINE)


@dataclass
class MarkdownTable:
    """A table whose rows each name the files that their numbers come from.

    Attributes:
        header: the columns' names; one more is added, the numbers of the sources.
        text: how many columns from the left are text.
        rows: cells, and the sources of each row.
        packages: whose versions the sources are told with; all that are recorded if none.
        note: what holds for all rows, between them and the sources.

    """

    header: tuple[str, ...]
    text: int = 1
    rows: list[tuple[tuple[str, ...], tuple[Source, ...]]] = field(default_factory=list)
    packages: tuple[str, ...] = ("torch", "jax")
    note: str = ""

    def add(self, *cells: str, of: Source | Sequence[Source]) -> None:
        """Add a row with its source or sources."""
        self.rows.append((cells, (of,) if isinstance(of, Source) else tuple(of)))

    def __str__(self) -> str:
        """As Markdown, with a list of the sources behind it."""
        sources = list(dict.fromkeys(source.name for _, every in self.rows for source in every))
        named = {source.name: source for _, every in self.rows for source in every}
        ruler = tuple("---" if i < self.text else "---:" for i in range(len(self.header)))
        if len(set(self._names())) == 1:  # all rows are of the same files
            lines = [self._line(cells) for cells in (self.header, ruler, *(cells for cells, _ in self.rows))]
        else:
            lines = [self._line((*self.header, "source")), self._line((*ruler, "---"))]
            for (cells, _), every in zip(self.rows, self._names(), strict=True):
                lines.append(self._line((*cells, ", ".join(f"[{sources.index(name) + 1}]" for name in every))))
        notes = [f"{place}. {origin(named[name], self.packages)}" for place, name in enumerate(sources, 1)]
        lines += ["", self.note] if self.note else []
        return "\n".join([*lines, "", "Sources (commit+: with changes beside it):", "", *notes])

    def _names(self) -> list[tuple[str, ...]]:
        return [tuple(source.name for source in every) for _, every in self.rows]

    @staticmethod
    def _line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cells)} |"


def origin(source: Source, packages: tuple[str, ...] = ()) -> str:
    """A file, and the machine, versions, commit and day of its numbers, in one line."""
    commit = f"commit {source.commit_text}" if source.commit else UNKNOWN
    facts = (source.machine, source.versions(packages), commit, source.date)
    known = ", ".join(fact for fact in facts if fact != UNKNOWN)
    said = f": {known}" if known else ", which says its machine and versions in its own words"
    return f"`benchmarks/results/{source.name}`{said}"


def of_machine(folder: Folder, machine: str) -> Folder:
    """The files of one machine, as their names end: `nvidia-h100-80gb-hbm3`."""
    kinds = ("results", "others", "experiments")
    chosen = {kind: tuple(s for s in getattr(folder, kind) if s.name.endswith(f"--{machine}.json")) for kind in kinds}
    return replace(folder, **chosen)


def the_result(folder: Folder, case: str, **conditions: Any) -> Result:
    """The newest whole result of a case, and where there is none the newest that its time ended; see `the_results`."""
    return max(the_results(folder, case, **conditions), key=lambda result: result.standing)


def the_results(folder: Folder, case: str, **conditions: Any) -> list[Result]:
    """Results of a case under these conditions; one that is None must be absent, as those of `UNUSUAL`.

    A tuple of values is any of them.

    Raises:
        ConfigError: if there is none.

    """
    wanted = {**UNUSUAL, **conditions}
    found = [
        r for r in folder.results if r.case == case and all(_holds(r, key, value) for key, value in wanted.items())
    ]
    if not found:
        asked = ", ".join(f"{key}={value}" for key, value in conditions.items())
        raise ConfigError(f"no result of {case} with {asked}; measure the case again, or take the table's row out")
    return found


def _holds(result: Result, key: str, value: Any) -> bool:
    if key == "device":
        return result.data["device"] == value
    return result.conditions.get(key) in (value if isinstance(value, tuple) else (value,))


def the_row(result: Result, name: str, **extra: Any) -> Measurement:
    """The first row of that name.

    Raises:
        ConfigError: if there is none.

    """
    for row in result.rows:
        if row.name == name and all(row.extra.get(key) == value for key, value in extra.items()):
            return row
    names = sorted(dict.fromkeys(row.name for row in result.rows), key=lambda each: -similarity(each, name))
    more = f", and {len(names) - NEAREST} more" if len(names) > NEAREST else ""
    raise ConfigError(f"{result.name}: no row {name!r}; expected one of {', '.join(names[:NEAREST])}{more}")


def a_record(records: Iterable[Mapping[str, Any]], /, **labels: Any) -> Mapping[str, Any] | None:
    """The first of a file's records that has these labels; None if none has."""
    return next((record for record in records if labels.items() <= record.items()), None)


def the_record(source: Source, records: Iterable[Mapping[str, Any]], /, **labels: Any) -> Mapping[str, Any]:
    """The first of a file's records that has these labels.

    Raises:
        ConfigError: if none has.

    """
    if (found := a_record(records, **labels)) is not None:
        return found
    asked = ", ".join(f"{key}={value}" for key, value in labels.items())
    raise ConfigError(f"{source.name}: no row with {asked}; measure it again, or take it out of the table")


def the_file(folder: Folder, start: str) -> Source:
    """The file of no case whose name starts so.

    Raises:
        ConfigError: if there is not exactly one.

    """
    found = [source for source in folder.others if source.name.startswith(start)]
    if len(found) != 1:
        several = "; name one's machine, as in <!-- table: NAME of MACHINE -->" if found else ""
        raise ConfigError(f"{len(found)} files {start}*.json among the results, expected one{several}")
    return found[0]


def the_experiment(folder: Folder, start: str) -> Source:
    """The newest experiment whose file's name starts so.

    Raises:
        ConfigError: if there is none.

    """
    found = [source for source in folder.experiments if source.name.startswith(start)]
    if not found:
        raise ConfigError(f"no file {start}*.json among the results; run the experiment, or take the table out")
    return max(found, key=lambda source: source.moment)


def the_part(source: Source, part: str) -> list[dict[str, Any]]:
    """The rows of an experiment's part.

    Raises:
        ConfigError: if there is no such part, or nothing of it has been run.

    """
    parts = {each["name"]: each["rows"] for each in source.data["parts"]}
    if part not in parts:
        raise ConfigError(f"{source.name}: no part {part!r}; expected one of {', '.join(parts)}")
    if not parts[part]:
        raise ConfigError(f"{source.name}: nothing of {part!r} has been run; run it, or take the table out")
    return parts[part]


def filled(text: str, tables: Tables, name: str) -> str:
    """Markdown with every marked table in place.

    Args:
        text: of the page.
        tables: what makes each, by name.
        name: the page's, for errors.

    Raises:
        ConfigError: for a table that there is not, or a place that does not begin and end in marks of its own.

    """
    _expect_pairs(text, name)

    def table(found: re.Match[str]) -> str:
        if found[2] not in tables:
            raise ConfigError(f"{name}: no table {found[2]!r}, expected one of {', '.join(tables)}")
        return f"{found[1]}\n{tables[found[2]](found[3] or '')}\n\n{found[4]}"

    return PLACE.sub(table, text)


def _expect_pairs(text: str, name: str) -> None:
    """See that the text behind a mark that was forgotten is not taken for a table, nor a misspelt mark for none."""
    begun = ""
    for found in MARK.finditer(text):
        mark, line = found[1].rstrip(), f"{name}, line {text.count(chr(10), 0, found.start()) + 1}"
        if not (mark == END or re.fullmatch(BEGIN, mark)):
            raise ConfigError(
                f"{line}: {mark}; expected <!-- table: NAME -->, <!-- table: NAME of MACHINE --> or {END}"
            )
        if bool(begun) != (mark == END):
            raise ConfigError(
                f"{line}: {mark}; expected {f'{END} of {begun}' if begun else 'the table to begin first'}"
            )
        begun = "" if mark == END else mark
    if begun:
        raise ConfigError(f"{name}: {begun} has no {END}; add it behind the table")


def fill_pages(pages: Sequence[Path], tables: Tables, check: bool = False) -> list[Path]:
    """Write the tables into the pages that have places for them.

    Args:
        pages: of Markdown.
        tables: what makes each, by name.
        check: whether to leave the pages as they are.

    Returns:
        Pages whose tables were not those of the results.

    """
    found = []
    for page in pages:
        with page.open(encoding="utf-8", newline="") as file:
            text = file.read()
        ends = "\r\n" if "\r\n" in text else "\n"
        if (new := filled(text.replace("\r\n", "\n"), tables, page.name).replace("\n", ends)) != text:
            found.append(page)
            if not check:
                replace_file(page.resolve(), new)  # a link stays one
    return found
