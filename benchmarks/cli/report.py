"""`python -m benchmarks report`: result pages of the site, tables, stale results, and curves of runs."""

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.harness.result_paths import RESULTS
from fullstride.cli.help import App
from fullstride.errors import ConfigError

report = App("Show results as pages of the documentation and as tables, list stale ones, and draw runs as curves.")
Results = Annotated[Path, typer.Option(help="Folder with the JSON results.")]


@report.command("site")
def site(
    results: Results = RESULTS, out: Annotated[Path, typer.Option(help="Folder for the site.")] = Path("site")
) -> None:
    """Build the documentation with a page for every case and experiment."""
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    build(load_config("mkdocs.yml", site_dir=str(out.resolve()), extra={"results": str(results.resolve())}))
    typer.echo(f"{out / 'results' / 'index.html'}")


@report.command("tables")
@report.command("readme", hidden=True)
def write_tables(
    pages: Annotated[list[Path] | None, typer.Argument(help="Markdown pages [default: README.md and docs/].")] = None,
    also: Annotated[list[Path] | None, typer.Option("--in", hidden=True)] = None,
    results: Results = RESULTS,
    check: Annotated[bool, typer.Option("--check", help="Change nothing; fail if a table is out of date.")] = False,
) -> None:
    """Rewrite the pages' tables, between `<!-- table: NAME -->` and `<!-- end of table -->`, and the README's chart."""
    from benchmarks.report.headline_chart import write_chart
    from benchmarks.report.places import fill_pages, makers

    chosen = [*(pages or []), *(also or [])] or [Path("README.md"), *sorted(Path("docs").rglob("*.md"))]
    found = fill_pages(chosen, makers(results), check)
    if not pages:
        found += write_chart(results, Path("docs/images/headlines.svg"), check)
    if check and found:
        names = ", ".join(str(page) for page in found)
        raise ConfigError(f"{names}: out of date with {results}; run: python -m benchmarks report tables")
    typer.echo(f"{len(chosen)} pages, {len(found)} changed")


@report.command("stale")
def stale(
    results: Results = RESULTS,
    machine: Annotated[str, typer.Option(help="Only results of machines whose name contains this text.")] = "",
    every: Annotated[
        bool, typer.Option("--all", help="Include results for which only the measuring code has changed.")
    ] = False,
) -> None:
    """Print a script that measures again each result that is not known to match the current code under test."""
    from benchmarks.report.frame import read_results
    from benchmarks.report.staleness import CHANGED, CURRENT, HARNESS, code_of, script, state

    read = read_results(results)
    judged = [(source, state(source)) for source in read.sources.values() if code_of(source)]
    chosen = [(source, its) for source, its in judged if machine.lower() in source.machine.lower()]
    if machine and judged and not chosen:
        # Names have commas of their own.
        there = ", ".join(map(repr, sorted({source.machine for source, _ in judged})))
        raise ConfigError(f"--machine {machine}: no result of such a machine; expected a part of one of {there}")
    current = (CURRENT,) if every else (CURRENT, HARNESS)
    if found := [(source, its) for source, its in chosen if its.name not in current]:
        typer.echo(script(found))
    changed = sum(its.name == CHANGED for _, its in found)
    unread = f"; {len(read.unread)} cannot be read" if read.unread else ""
    typer.echo(
        f"{len(found)} of {len(chosen)} results listed, {changed} of them of changed code under test{unread}", err=True
    )


@report.command("runs")
def show_runs(
    folders: Annotated[list[Path], typer.Argument(help="Folder of a run, or folder of runs.")],
    out: Annotated[Path, typer.Option(help="Folder for index.html.")] = Path("runs/report"),
) -> None:
    """Draw every metric of the runs as curves, on one page."""
    from benchmarks.report.runs import write_runs

    page, count = write_runs(folders, out)
    typer.echo(f"{page}: {count} run{'s' * (count != 1)}")
