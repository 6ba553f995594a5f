"""The command line of the benchmarks: one command a case, an experiment and the report."""

import typer

from benchmarks.cli import cases, experiments
from benchmarks.cli.report import report
from benchmarks.harness.outputs import default_output
from fullstride.cli.help import App
from fullstride.cli.running import OneLineErrors

app = App(
    "Measure a case beside its roofline bound, run an experiment over several seeds, write the report.",
    {**cases.GROUPS, **experiments.GROUPS, "Results": "report"},
    cls=OneLineErrors,
)
for group in (cases.app, experiments.app):
    app.registered_commands.extend(group.registered_commands)
app.command("report")(report)


@app.command("outputs", hidden=True, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def outputs(context: typer.Context) -> None:
    """Print where a command of these writes unless it is given --out; nothing if it has no such folder."""
    typer.echo(default_output(context.args) or "", nl=False)
