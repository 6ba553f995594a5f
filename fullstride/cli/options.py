"""The options `--device` and `--out` of the commands that have them."""

from pathlib import Path
from typing import Annotated

import typer

from fullstride.device.select import describe, resolve_device
from fullstride.process import torchrun

Device = Annotated[
    str, typer.Option(metavar="auto|cuda|mps|cpu", help="auto takes the first of the others that is there.")
]
Results = Annotated[Path, typer.Option(help="Folder for the JSON of this run.")]


def announce(device: str) -> None:
    """Say what `auto` chooses; a named device that is absent is refused here, before anything else runs."""
    chosen = resolve_device(device)
    if device == "auto" and torchrun.rank() == 0:
        typer.echo(f"device=auto: {describe(chosen)}")
