"""The last lines of a command: the paths of its files, and the commands that continue from them."""

import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console


def say(line: str) -> None:
    """Print a line as it is, without wrapping it, so that what it names can be copied."""
    Console().print(line, markup=False, highlight=False, soft_wrap=True)


def program() -> str:
    """The command line as it was started, since `fullstride` is not on the path of a shell outside its environment."""
    started = Path(sys.argv[0])
    if started.name == "__main__.py" and started.parent.name == "fullstride":
        return f"{shlex.quote(sys.orig_argv[0])} -m fullstride"
    if started.name != "fullstride":  # imported by another program
        return "fullstride"
    found = shutil.which("fullstride")
    on_path = found is not None and started.exists() and Path(found).samefile(started)
    return "fullstride" if on_path else shlex.quote(str(started))


def command(*words: str | Path) -> str:
    """A command of this program, as a shell takes it."""
    return f"{program()} {shlex.join(map(str, words))}"


def show_next_steps(files: Mapping[Path, str], commands: Mapping[str, str]) -> None:
    """Print files and commands, each with what it is; a person copies them, so that no line is wrapped.

    Args:
        files: paths, with a description of each.
        commands: command lines from `command`, with a description of each.

    """
    for line in _aligned(files, "  "):
        say(line)
    say("next:")
    for line in _aligned(commands, "  # "):
        say(line)


def _aligned(explained: Mapping[Any, str], between: str) -> list[str]:
    width = max(len(str(name)) for name in explained)
    return [f"  {name!s:{width}}{between}{what}" for name, what in explained.items()]
