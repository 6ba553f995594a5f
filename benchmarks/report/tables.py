"""Tables as declarations: a query of the data frame, a pivot, and a template per cell, written as Markdown."""

import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from benchmarks.harness.experiment_table import number
from benchmarks.report.frame import Results
from fullstride.errors import ConfigError
from fullstride.measure.roofline import marked

Row = tuple[tuple[str, ...], tuple[str, ...]]  # cells, and the names of their files
Compute = Mapping[str, Callable[[pd.DataFrame], Any]]  # columns that follow from others


class _Template(string.Formatter):
    """Formatter with its own specifications: `n3` is three significant digits, `over` a multiple of the bound."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec == "over":
            return marked(number(value, 3), value)
        if format_spec[:1] == "n":
            return number(value, int(format_spec[1:]))
        return super().format_field(value, format_spec)


def fill(template: str, values: Mapping[str, Any]) -> str:
    """Fill a template with a row's values, or with the reason of a missing time; ConfigError if a column is missing."""
    names = [name for _, name, _, _ in string.Formatter().parse(template) if name]
    if lacking := [name for name in names if name not in values]:
        raise ConfigError(f"no {', '.join(lacking)} in the result; measure it again, or remove it from the table")
    if all(values[name] is not None and values[name] == values[name] for name in names):
        return _Template().vformat(template, (), values)
    why = values.get(f"{names[0].removesuffix('median')}why")
    return why.partition(":")[0] if isinstance(why, str) and why != "left out" else ""


@dataclass(frozen=True)
class Rows:
    """Rows of a table: measurements unchanged, or pivoted so that several stand in one row."""

    files: str | Mapping[str, str]  # a pattern of names, see `Results.newest`; several by what column `of` calls them
    cells: tuple[str, ...]  # templates over the columns, as `{median:.2f}`
    names: str = ""  # a pattern of rows' names whose groups become columns; what it does not match is left out
    column: str = "row"  # what it is matched with
    where: str = ""  # which rows, as pandas' `query` has it
    first: str = ""  # where several fall together, that of the least of this column, or with `-` of the greatest
    index: tuple[str, ...] = ()  # what tells rows of the table apart once others are spread; none if all is one row
    by: tuple[str, ...] = ("row",)  # columns whose values, joined by a blank, are spread
    across: Mapping[str, str] = field(default_factory=dict)  # these by the prefix of their columns, as `{flow_median}`
    optional: tuple[str, ...] = ()  # prefixes of values that need not be there
    compute: Compute = field(default_factory=dict)
    having: str = ""  # which rows stay in the end

    def frame(self, results: Results, machine: str = "") -> pd.DataFrame:
        """Return the table's rows before formatting."""
        files = {"": self.files} if isinstance(self.files, str) else self.files
        frames = [results.of(results.newest(file, machine)).assign(of=of) for of, file in files.items()]
        found: Any = pd.concat(frames, ignore_index=True)
        if self.names:
            named = found[self.column].str.extract(f"^{self.names}$")
            found = found.assign(**named)[named.notna().any(axis=1)]
        found = found.query(self.where) if self.where else found
        if self.first:
            found = found.sort_values(self.first.removeprefix("-"), ascending=self.first[0] != "-", kind="stable")
        found = (self._spread(found) if self.across else found).assign(**self.compute)
        return found.query(self.having) if self.having else found

    def _spread(self, found: Any) -> pd.DataFrame:
        index = list(self.index) or ["all"]
        key = found[list(self.by)].map(str).agg(" ".join, axis=1)
        names, found = (
            ", ".join(found["file"].unique()),
            found.assign(all="", key=key)[key.isin(self.across.values())].drop_duplicates([*index, "key"]),
        )
        needed = {value for prefix, value in self.across.items() if prefix not in self.optional}
        if lacking := needed - {*found["key"]}:
            raise ConfigError(f"{names}: no row {', '.join(lacking)}; measure it again")
        order = found.sort_index()[index].drop_duplicates()
        columns = found.columns.difference([*index, "key"])
        every = [(column, value) for column in columns for value in self.across.values()]
        spread = found.set_index([*index, "key"]).unstack("key").reindex(columns=pd.MultiIndex.from_tuples(every))
        prefixes = {value: prefix for prefix, value in self.across.items()}
        spread.columns = [f"{prefixes[value]}_{column}" for column, value in every]
        return order.merge(spread.reset_index(), on=index)

    def written(self, results: Results, machine: str = "") -> Iterator[Row]:
        """Return cells and their source files; a pivoted row lists all files of its block, unless it has one file."""
        found = self.frame(results, machine)
        columns = [f"{prefix}_file" for prefix in self.across] or ["file"]
        every = found[columns].to_numpy().ravel()
        for record in found.to_dict("records"):
            own = [record[column] for column in columns] if "of" in self.index or not self.across else every
            files = tuple(dict.fromkeys(file for file in own if isinstance(file, str)))
            yield tuple(fill(cell, record) for cell in self.cells), files


@dataclass(frozen=True)
class Table:
    """Table of the documentation; a further column numbers its sources if rows are from different files."""

    header: tuple[str, ...]
    # Blocks of rows, or a function of the results and a machine's name that makes them and a note below.
    rows: Sequence[Rows] | Callable[[Results, str], tuple[list[Row], str]]
    packages: tuple[str, ...] = ("torch", "jax")  # whose versions the sources are told with

    def markdown(self, results: Results, machine: str = "") -> str:
        """Return the table with its sources; ConfigError if a required result or row is missing."""
        if callable(self.rows):
            rows, note = self.rows(results, machine)
        else:
            rows, note = [row for block in self.rows for row in block.written(results, machine)], ""
        files = list(dict.fromkeys(file for _, every in rows for file in every))
        several = len({every for _, every in rows}) > 1
        lines = [[*self.header, *["source"] * several]]
        lines.append(["---", *["---:"] * (len(self.header) - 1)] + ["---"] * several)
        for cells, every in rows:
            lines.append([*cells, *[", ".join(f"[{files.index(file) + 1}]" for file in every)] * several])
        text = [f"| {' | '.join(cells)} |" for cells in lines] + (["", note] if note else [])
        if files:
            text += ["", "Sources (commit+: with changes beside it):", ""]
        for place, file in enumerate(files, 1):
            text.append(f"{place}. `benchmarks/results/{file}`: {results.sources[file].origin(self.packages)}")
        return "\n".join(text)
