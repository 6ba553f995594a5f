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


def _add(app: typer.Typer, name: str, words: list[str]) -> None:
    @app.command(name, hidden=True, context_settings=ANYTHING, help=f"Now: python -m benchmarks {' '.join(words)}")
    def moved(context: typer.Context) -> None:
        new = " ".join(["python -m benchmarks", *words])
        root = Path(fullstride.__file__).parents[1]
        if not (root / "benchmarks" / "__main__.py").is_file():
            raise ConfigError(f"fullstride {name} is now {new}; run it from the root of a clone")
        typer.echo(f"fullstride {name} is now: {new}", err=True)
        path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
        command = [sys.executable, "-m", "benchmarks", *words, *context.args]
        # In this one's place, so that signals and the exit code are its own.
        os.execve(sys.executable, command, os.environ | {"PYTHONPATH": path})
