"""Tables inside Markdown pages: between two comments, written by a command and checked by a test."""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from benchmarks.report.frame import read_results
from benchmarks.report.placed import experiments, headlines, steps
from fullstride.errors import ConfigError
from fullstride.runs.atomic_files import replace_file

TABLES = headlines.TABLES | steps.TABLES | experiments.TABLES
BEGIN, END = r"<!-- table: (?P<name>[\w-]+)(?: of (?P<machine>[\w-]+))? -->[ \t]*\n", "<!-- end of table -->"
PLACE = re.compile(rf"(?P<begin>^{BEGIN})(?P<old>.*?)(?P<end>^{END})", re.DOTALL | re.MULTILINE)
# A line that is meant to be one of the two.
MARK = re.compile(r"^[ \t]*<!--[ \t]*(?:table|end of table)\b.*$", re.MULTILINE)
# What makes a table's Markdown, by its name, of a machine's results or, of "", of any.
Makers = Mapping[str, Callable[[str], str]]


def makers(folder: Path) -> Makers:
    """Return the makers of the tables by name, for a folder of results."""
    results = read_results(folder)

    def make(name: str, machine: str) -> str:
        if machine and name in headlines.OWN:
            raise ConfigError(f"table {name!r}: it describes the planner's own machine; remove 'of {machine}'")
        try:
            return TABLES[name].markdown(results, machine)
        except (LookupError, TypeError, ValueError, AttributeError, NameError) as error:
            raise ConfigError(
                f"table {name!r}: a result has an unexpected form ({type(error).__name__}: {error}); measure it again, "
                "or remove the table"
            ) from error

    return {name: partial(make, name) for name in TABLES}


def filled(text: str, tables: Makers, page: str) -> str:
    """Return Markdown with every marked table filled; ConfigError for an unknown table or unpaired marks."""
    for found in PLACE.finditer(text):
        if mark := MARK.search(found["old"]):
            raise ConfigError(f"{page}: {mark[0].strip()} inside table {found['name']}; expected {END} before it")
        if found["name"] not in tables:
            raise ConfigError(f"{page}: no table {found['name']!r}, expected one of {', '.join(tables)}")
    if mark := MARK.search(PLACE.sub("", text)):
        raise ConfigError(
            f"{page}: unpaired {mark[0].strip()}; expected <!-- table: NAME [of MACHINE] --> and then {END}"
        )
    return PLACE.sub(lambda found: f"{found['begin']}\n{tables[found['name']](found['machine'] or '')}\n\n{END}", text)


def fill_pages(pages: Sequence[Path], tables: Makers, check: bool = False) -> list[Path]:
    """Write the tables into pages, or only `check` them; return the pages that changed."""
    found = []
    for page in pages:
        text = page.read_bytes().decode()
        ends = "\r\n" if "\r\n" in text else "\n"
        if (new := filled(text.replace("\r\n", "\n"), tables, page.name).replace("\n", ends)) != text:
            found.append(page)
            if not check:
                replace_file(page.resolve(), new)  # a link stays one
    return found
