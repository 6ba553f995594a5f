"""Options of cases: one dataclass a case, whose fields are the options of its command."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer

from fullstride.errors import one_of

Seconds = Annotated[
    float,
    typer.Option(
        min=0, help="Number of seconds after which nothing new is begun, as after Ctrl-C; rows left out are named."
    ),
]


Device = Annotated[
    str, typer.Option(metavar="auto|cuda|mps|cpu", help="Device; auto takes the first of the others that exists.")
]
Results = Annotated[Path, typer.Option(help="Folder for the JSON results of this run.")]
Names = tuple[str, ...]


def among(names: str, told: str, flag: str = "") -> Any:
    """Return an option for names, which its help shows joined by `|`, with the help text `told`."""
    return typer.Option(*filter(None, [flag]), metavar=names, help=told)


@dataclass(frozen=True)
class CaseOptions:
    """Options as `Annotated[type, typer.Option(...)]`; a third argument holds the allowed names."""

    def __post_init__(self) -> None:
        """Check the names; ConfigError for one that is not allowed."""
        for field, hint in get_type_hints(type(self), include_extras=True).items():
            if len(get_args(hint)) > len(("type", "option")):
                _, option, allowed = get_args(hint)
                # Typer takes a name that is given to an annotation for a default until it makes the command.
                name = option.default if isinstance(option.default, str) else f"--{field.replace('_', '-')}"
                given = getattr(self, field)
                for value in given if isinstance(given, tuple) else (given,):
                    one_of(name, value, allowed)
