"""The command line of the benchmarks: one command a case, an experiment and the report."""

import json

import typer

from benchmarks.cli import cases, experiments
from benchmarks.cli.report import report
from benchmarks.harness.result_paths import outputs
from fullstride.cli.help import App
from fullstride.cli.moved import ANYTHING
from fullstride.cli.running import OneLineErrors

app = App(
    "Measure a case beside its roofline bound, run an experiment over several seeds, write the report.",
    {**cases.GROUPS, **experiments.GROUPS, "Results": "report"},
    cls=OneLineErrors,
)
for group in (cases.app, experiments.app):
    app.registered_commands.extend(group.registered_commands)
app.add_typer(report, name="report")


@app.command("outputs", hidden=True, context_settings=ANYTHING)
def show_outputs(context: typer.Context) -> None:
    """Print what a command of these writes to, as JSON, for `fullstride launch`."""
    typer.echo(json.dumps(outputs(context.parent and context.parent.command, context.args)))
