"""`python -m benchmarks report`."""

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.harness.result_paths import RESULTS
from fullstride.errors import ConfigError, one_of

KINDS = ("page", "readme", "stale")


def report(
    what: Annotated[
        str,
        typer.Argument(
            metavar="page|readme|stale",
            help="The page of results, the tables of README.md and docs/, or the commands that measure anew what is "
            "not known to be of the present code.",
        ),
    ] = "page",
    results: Annotated[
        Path | None,
        typer.Option(help="Folder with the JSON of cases; benchmarks/results unless given."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for index.html and figures/; runs/report unless given.")
    ] = None,
    runs: Annotated[
        list[Path] | None, typer.Option(help="A run's folder, or one of runs: its metrics as curves instead.")
    ] = None,
    pages: Annotated[list[Path] | None, typer.Option("--in", help="A Markdown page, for readme.")] = None,
    check: Annotated[
        bool, typer.Option("--check", help="With readme: change nothing, fail if a table is old.")
    ] = False,
    machine: Annotated[str, typer.Option(help="With stale: results of machines with this in their name alone.")] = "",
) -> None:
    """Every result as one HTML page, with figures, and which are older than their code."""
    one_of("what", what, KINDS)
    for option, given, kind in (
        ("--check", check, "readme"),
        ("--in", bool(pages), "readme"),
        ("--machine", bool(machine), "stale"),
        ("--runs", bool(runs), "page"),
        ("--out", out is not None, "page"),
    ):
        if given and what != kind:
            raise ConfigError(f"{option} goes with `report {kind}` alone; received it with {what}")
    if runs and results is not None:
        raise ConfigError("--results goes without --runs, which shows runs instead; leave one of them out")
    results, out = results or RESULTS, out or Path("runs/report")
    if what == "readme":
        _readme(pages or [Path("README.md"), *sorted(Path("docs").rglob("*.md"))], results, check)
        return
    if what == "stale":
        _stale(results, machine)
        return
    if runs:
        from benchmarks.report.runs import write_runs

        page, count = write_runs(runs, out)
        typer.echo(f"{page}: {count} run{'s' * (count != 1)}")
        return
    from benchmarks.report.history import History, repository
    from benchmarks.report.page import write_page
    from benchmarks.report.reading import read_folder

    folder = read_folder(results)
    page = write_page(folder, History(repository()), out)
    others = f"{len(folder.others)} other file{'s' * (len(folder.others) != 1)}"
    experiments = f"{len(folder.experiments)} experiment{'s' * (len(folder.experiments) != 1)}"
    typer.echo(f"{page}: {len(folder.results)} results, {experiments}, {others}, {len(folder.unread)} unread")


def _readme(pages: list[Path], results: Path, check: bool) -> None:
    """Write the tables between `<!-- table: NAME -->` and `<!-- end of table -->` anew."""
    from benchmarks.report.doc_tables.tables import tables
    from benchmarks.report.markdown import fill_pages

    found = fill_pages(pages, tables(results), check)
    if check and found:
        names = ", ".join(str(page) for page in found)
        raise ConfigError(f"{names}: tables that are not those of {results}; run: python -m benchmarks report readme")
    typer.echo(f"{len(pages)} pages, {len(found)} changed")


def _stale(results: Path, machine: str) -> None:
    """A script on stdout, to be read, or by `| sh` to be run; how many there are on stderr."""
    from benchmarks.report.history import History, repository
    from benchmarks.report.reading import read_folder
    from benchmarks.report.renewal import CURRENT, judged, script

    folder = read_folder(results)
    files = list(judged(folder, History(repository())))
    every = [(source, freshness) for source, freshness in files if machine.lower() in source.machine.lower()]
    if machine and files and not every:
        # Names have commas of their own.
        there = ", ".join(map(repr, sorted({source.machine for source, _ in files})))
        raise ConfigError(f"--machine {machine}: no result of one; expected a part of one of {there}")
    if found := [(source, freshness) for source, freshness in every if freshness.status != CURRENT]:
        typer.echo(script(found))
    unread = f"; {len(folder.unread)} cannot be read" if folder.unread else ""
    typer.echo(f"{len(found)} of {len(every)} are not known to be current{unread}", err=True)
