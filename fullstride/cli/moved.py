"""Commands that are not the library's any more: they say their new name and run it, from a clone."""

import os
import sys
from pathlib import Path

import typer

import fullstride
from fullstride.errors import ConfigError

# By their old names, the words of the new ones.
MOVED = {"bench": [], "experiment": [], "report": ["report"]}
ANYTHING = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def add_moved(app: typer.Typer) -> None:
    """Register them, out of the list of commands."""
    for name, words in MOVED.items():
        _add(app, name, words)


def benchmarks_command(name: str, words: list[str]) -> tuple[list[str], dict[str, str]]:
    """Return the command line and the environment of a command of the benchmarks.

    Args:
        name: what the user gave, for the error.
        words: words of the command.

    Raises:
        ConfigError: without a clone, in which they lie beside the library.

    """
    root = Path(fullstride.__file__).parents[1]
    if not (root / "benchmarks" / "__main__.py").is_file():
        new = " ".join(["python -m benchmarks", *words])
        raise ConfigError(f"fullstride {name} is now {new}; run it from the root of a clone")
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    return [sys.executable, "-m", "benchmarks", *words], os.environ | {"PYTHONPATH": path}


def _add(app: typer.Typer, name: str, words: list[str]) -> None:
    new = " ".join(["python -m benchmarks", *words])

    @app.command(name, hidden=True, context_settings=ANYTHING, help=f"Now: {new}")
    def moved(context: typer.Context) -> None:
        command, environment = benchmarks_command(name, words)
        typer.echo(f"fullstride {name} is now: {new}", err=True)
        # In this one's place, so that signals and the exit code are its own.
        os.execve(sys.executable, [*command, *context.args], environment)
