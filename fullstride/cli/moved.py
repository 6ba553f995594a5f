"""Commands that moved out of the library: they print their new name and run it, from a clone."""

import os
import sys
from pathlib import Path
from typing import Any

import typer

import fullstride
from fullstride.errors import ConfigError
from fullstride.launch.words import OLD

ANYTHING = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def add_moved(app: typer.Typer) -> None:
    """Register them, hidden from the list of commands."""
    for name, words in OLD.items():
        about = f"Now: python -m {' '.join(words)}"
        app.command(name, hidden=True, context_settings=ANYTHING, help=about)(_moved)


def _moved(context: Any) -> None:
    words = OLD[str(context.info_name)]
    new = f"python -m {' '.join(words)}"
    root = Path(fullstride.__file__).parents[1]
    if not (root / "benchmarks" / "__main__.py").is_file():
        raise ConfigError(f"fullstride {context.info_name} is now {new}; run it from the root of a clone")
    typer.echo(f"fullstride {context.info_name} is now: {new}", err=True)
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    # In this one's place, so that signals and the exit code are its own.
    command = [sys.executable, "-m", *words, *context.args]
    os.execve(sys.executable, command, os.environ | {"PYTHONPATH": path})
