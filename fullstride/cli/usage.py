"""What a mistake in a command line is told beside the parser's own words: which commands there are, how settings go."""

from typing import Any, cast

import typer

# click's, which some releases of Typer bring along under a name of their own.
UsageError = cast(type[Exception], typer.BadParameter.__mro__[1])


def advise(error: Any) -> None:
    """Add to a usage error's message what would have been right, where that can be told."""
    if (context := error.ctx) is None:
        return
    if name := getattr(error, "option_name", ""):
        if any(parameter.name == "overrides" for parameter in context.command.params):
            error.message += f"; settings go without dashes: {name.lstrip('-').replace('-', '_')}=VALUE"
    elif error.message.startswith("No such command"):
        error.message += f" Expected one of: {', '.join(context.command.list_commands(context))}."
