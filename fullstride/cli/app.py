"""Command line: one Typer app, whose commands import their own area only when they run."""

import json
from typing import Annotated

import typer

from fullstride import __version__
from fullstride.cli.bert import app as bert
from fullstride.cli.cache import app as cache
from fullstride.cli.help import App
from fullstride.cli.launch import app as launch
from fullstride.cli.llm import app as llm
from fullstride.cli.meanflow import app as meanflow
from fullstride.cli.moved import add_moved
from fullstride.cli.running import OneLineErrors, run
from fullstride.cli.runs import app as runs

app = App(
    "Training and serving where a step costs what the hardware charges.",
    {
        "Train and serve": "meanflow bert llm",
        "Runs and machines": "runs doctor cache launch",
        "Shell completion": "install_completion show_completion",
    },
    cls=OneLineErrors,
)
app.add_typer(meanflow, name="meanflow")
app.add_typer(bert, name="bert")
app.add_typer(llm, name="llm")
app.add_typer(launch, name="launch")
app.add_typer(cache, name="cache")
app.add_typer(runs, name="runs")
add_moved(app)


def _show_version(wanted: bool) -> bool:
    if wanted:
        typer.echo(f"fullstride {__version__}")
        raise typer.Exit
    return wanted


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options of the app itself."""


@app.command("doctor")
def show_doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False) -> None:
    """Show versions, devices and what can run here."""
    from fullstride.cli.doctor import doctor, report

    if as_json:
        typer.echo(json.dumps(report(), indent=2))
    else:
        doctor()


def main() -> None:
    """Run the command line."""
    run(app)
