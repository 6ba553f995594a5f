"""`fullstride report`."""

from pathlib import Path
from typing import Annotated

import typer


def report(
    results: Annotated[Path, typer.Option(help="Folder with the JSON of `fullstride bench`.")] = Path(
        "benchmarks/results"
    ),
    out: Annotated[Path, typer.Option(help="Folder for index.html and figures/.")] = Path("runs/report"),
) -> None:
    """Every result as one HTML page, with figures, and which are older than their code."""
    from fullstride.report.history import History, repository
    from fullstride.report.page import write_page
    from fullstride.report.reading import read_folder

    folder = read_folder(results)
    page = write_page(folder, History(repository()), out)
    others = f"{len(folder.others)} other file{'s' * (len(folder.others) != 1)}"
    experiments = f"{len(folder.experiments)} experiment{'s' * (len(folder.experiments) != 1)}"
    typer.echo(f"{page}: {len(folder.results)} results, {experiments}, {others}, {len(folder.unread)} unread")
