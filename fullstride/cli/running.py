"""Run of a command line: one-line errors, exit codes, output, process, device."""

import io
import os
import sys
from typing import Any, NoReturn, cast

import typer

from fullstride.cli.help import HelpGroup
from fullstride.device.select import describe, resolve_device
from fullstride.errors import ConfigError, OutOfMemory, PeerError, Preempted, ReadError, is_out_of_memory, one_line
from fullstride.extras import OWN, advice, extra_for, how_to_install
from fullstride.measure.gate import GateError
from fullstride.process import exit_codes, torchrun
from fullstride.process.parent import end_with_launcher
from fullstride.runs.atomic_files import note

# click's, which some releases of Typer bring along under a name of their own.
UsageError = cast(type[Exception], typer.BadParameter.__mro__[1])


def _stop(message: str, code: int) -> NoReturn:
    typer.echo(" ".join(message.split()), err=True)
    raise typer.Exit(code)


def _advise(error: Any) -> None:
    """Add a correction to a usage error's message, if one is known."""
    if (context := error.ctx) is None:
        return
    if name := getattr(error, "option_name", ""):
        if any(parameter.name == "overrides" for parameter in context.command.params):
            error.message += f"; settings go without dashes: {name.lstrip('-').replace('-', '_')}=VALUE"
    elif error.message.startswith("No such command"):
        error.message += f" Expected one of: {', '.join(context.command.list_commands(context))}."


class OneLineErrors(HelpGroup):
    """Group whose errors are one line on stderr if the user can act on them; bugs keep their traceback.

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
            _advise(error)
            raise
        except ModuleNotFoundError as error:
            if error.name is None or error.name.split(".")[0] in OWN:
                raise
            lacking = advice(error) or f"{error.name} is not installed; {how_to_install(extra_for(error))}"
            _stop(f"error: {lacking}", exit_codes.SETTINGS)
        except (ConfigError, OutOfMemory, ReadError, FloatingPointError, GateError, OSError, PeerError) as error:
            _stop(f"error: {error}", exit_codes.exit_code_of(error))
        except (Preempted, KeyboardInterrupt) as stopped:
            _stop(str(stopped) or "interrupted", exit_codes.exit_code_of(stopped))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            reason = one_line(error)[:600]  # XLA adds what lies where, for pages
            _stop(f"error: out of memory; use smaller batches: {reason}", exit_codes.exit_code_of(error))


class _Descriptor(io.FileIO):
    """File that continues as /dev/null when its reader has left, as `head` does."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self.fileno())
            return memoryview(data).nbytes


def outlive_readers() -> None:
    """Let a command run to its end, with the exit code of its work, if nobody reads what it prints.

    Characters that cannot be encoded do not end it either.
    """
    for name in ("stdout", "stderr"):
        if isinstance(stream := getattr(sys, f"__{name}__"), io.TextIOWrapper):  # None if it is closed
            stream.flush()
            raw = _Descriptor(stream.fileno(), "wb", closefd=False)
            lasting = io.TextIOWrapper(
                io.BufferedWriter(raw) if isinstance(stream.buffer, io.BufferedWriter) else raw,  # python -u has none
                encoding=stream.encoding,
                errors="replace",
                line_buffering=stream.line_buffering,
                write_through=stream.write_through,
            )
            setattr(sys, name, lasting)
            setattr(sys, f"__{name}__", lasting)


def announce(device: str) -> None:
    """Print the device that `auto` chooses, and check that a named device exists before anything else runs.

    Raises:
        ConfigError: see `resolve_device`.

    """
    chosen = resolve_device(device)
    if device == "auto" and torchrun.rank() == 0:
        typer.echo(f"device=auto: {describe(chosen)}")


def run(app: typer.Typer) -> None:
    """Run an app as this process's command line."""
    end_with_launcher()
    outlive_readers()
    try:
        app()
    except OSError as error:  # of --help and --version, which click prints before it invokes anything
        note(f"error: {error}")
        # What is left in the buffers cannot be written either, and would be another error.
        sys.stdout = sys.__stdout__ = None  # type: ignore[assignment]
        raise SystemExit(exit_codes.FAILED) from None
