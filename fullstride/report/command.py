"""`fullstride report`."""

from pathlib import Path
from typing import Annotated

import typer

from fullstride.errors import ConfigError

app = typer.Typer(rich_markup_mode=None)
RESULTS = Path("benchmarks/results")
Results = Annotated[Path, typer.Option(help="Folder with the JSON of `fullstride bench`.")]
Pages = Annotated[list[Path] | None, typer.Argument(help="README.md and docs/*.md unless given.")]


@app.callback(invoke_without_command=True)
def report(
    context: typer.Context,
    results: Results = RESULTS,
    out: Annotated[Path, typer.Option(help="Folder for index.html and figures/.")] = Path("runs/report"),
    runs: Annotated[
        list[Path] | None, typer.Option(help="A run's folder, or one of runs: its metrics as curves instead.")
    ] = None,
) -> None:
    """Every result as one HTML page, with figures, and which are older than their code."""
    if context.invoked_subcommand:
        return
    if runs:
        from fullstride.report.runs import write_runs

        page, count = write_runs(runs, out)
        typer.echo(f"{page}: {count} run{'s' * (count != 1)}")
        return
    from fullstride.report.history import History, repository
    from fullstride.report.page import write_page
    from fullstride.report.reading import read_folder

    folder = read_folder(results)
    page = write_page(folder, History(repository()), out)
    others = f"{len(folder.others)} other file{'s' * (len(folder.others) != 1)}"
    typer.echo(f"{page}: {len(folder.results)} results, {others}, {len(folder.unread)} unread")


@app.command()
def readme(
    pages: Pages = None,
    results: Results = RESULTS,
    check: Annotated[
        bool, typer.Option("--check", help="Change nothing; fail if a table is not the results'.")
    ] = False,
) -> None:
    """Write the tables between `<!-- table: NAME -->` and `<!-- end of table -->` anew, out of the results."""
    from fullstride.report.markdown import fill_pages
    from fullstride.report.written import tables

    given = pages or [Path("README.md"), *sorted(Path("docs").rglob("*.md"))]
    found = fill_pages(given, tables(results), check)
    if check and found:
        names = ", ".join(str(page) for page in found)
        raise ConfigError(f"{names}: tables that are not those of {results}; run: fullstride report readme")
    typer.echo(f"{len(given)} pages, {len(found)} changed")
