"""The command line: one Typer app, whose commands import their own area only when they run."""

import json
from typing import Annotated, Any, NoReturn

import typer

from fullstride import __version__
from fullstride.cli.bert import app as bert
from fullstride.cli.cache import app as cache
from fullstride.cli.help import App, HelpGroup
from fullstride.cli.launch import app as launch
from fullstride.cli.llm import app as llm
from fullstride.cli.meanflow import app as meanflow
from fullstride.cli.output import outlive_readers
from fullstride.cli.usage import UsageError, advise
from fullstride.cli_bench import app as bench
from fullstride.cli_experiment import app as experiment
from fullstride.errors import ConfigError, OutOfMemory, PeerError, Preempted, ReadError, in_a_line, is_out_of_memory
from fullstride.extras import advice, extra_for, how_to_install
from fullstride.measure.gate import GateError
from fullstride.process import exit_codes as exits
from fullstride.process.deadline import begin_process
from fullstride.process.parent import end_with_launcher
from fullstride.report.command import report


def _stop(message: str, code: int) -> NoReturn:
    typer.echo(" ".join(message.split()), err=True)
    raise typer.Exit(code)


class OneLineErrors(HelpGroup):
    """Ends in one line on stderr where the user can act on it; what is a bug keeps its traceback.

    Exit codes, as `fullstride.process.exit_codes` names them: 2 for a setting or a package that is missing, 12 for
    memory that ran out, 74 for data that cannot be read for now, 1 for a loss that is not finite, a gate that does not
    open, a disk that ran full, another process that failed,
    130 for an interrupt, 0 for a SIGTERM after which everything was saved. A watchdog's 75 does not come by here.
    """

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except UsageError as error:
            advise(error)
            raise
        except ConfigError as error:
            _stop(f"error: {error}", exits.SETTINGS)
        except ModuleNotFoundError as error:
            if error.name is None or error.name.startswith("fullstride"):
                raise
            lacking = advice(error) or f"{error.name} is not installed; {how_to_install(extra_for(error))}"
            _stop(f"error: {lacking}", exits.SETTINGS)
        except OutOfMemory as error:
            _stop(f"error: {error}", exits.OUT_OF_MEMORY)
        except ReadError as error:
            _stop(f"error: {error}", exits.UNREAD)
        except (FloatingPointError, GateError, OSError, PeerError) as error:
            _stop(f"error: {error}", exits.FAILED)
        except Preempted as stopped:
            _stop(str(stopped), exits.DONE)
        except KeyboardInterrupt as interrupt:
            _stop(str(interrupt) or "interrupted", exits.INTERRUPTED)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            reason = in_a_line(error)[:600]  # XLA adds what lies where, for pages
            _stop(f"error: out of memory, smaller batches need less: {reason}", exits.OUT_OF_MEMORY)


app = App(
    "Training and serving where a step costs what the hardware charges.",
    {
        "Train and serve": "meanflow bert llm",
        "Machines": "doctor cache launch",
        "Measure": "bench experiment report",
        "Shell completion": "install_completion show_completion",
    },
    cls=OneLineErrors,
)
app.add_typer(meanflow, name="meanflow")
app.add_typer(bert, name="bert")
app.add_typer(llm, name="llm")
app.add_typer(launch, name="launch")
app.add_typer(bench, name="bench")
app.add_typer(experiment, name="experiment")
app.command("report")(report)
app.add_typer(cache, name="cache")


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
def show_doctor(as_json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False) -> None:
    """Show versions, devices and what can run here."""
    from fullstride.cli.doctor import doctor, report

    if as_json:
        typer.echo(json.dumps(report(), indent=2))
    else:
        doctor()


def main() -> None:
    """Run the command line."""
    begin_process()
    end_with_launcher()
    outlive_readers()
    app()
