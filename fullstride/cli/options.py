"""Options `--device` and `--out`, shared by several commands."""

from pathlib import Path
from typing import Annotated

import typer

from fullstride.device.select import describe, resolve_device
from fullstride.process import torchrun

Device = Annotated[
    str, typer.Option(metavar="auto|cuda|mps|cpu", help="Device; auto takes the first of the others that exists.")
]
Results = Annotated[Path, typer.Option(help="Folder for the JSON results of this run.")]


def announce(device: str) -> None:
    """Print the device that `auto` chooses, and check that a named device exists before anything else runs.

    Raises:
        ConfigError: see `resolve_device`.

    """
    chosen = resolve_device(device)
    if device == "auto" and torchrun.rank() == 0:
        typer.echo(f"device=auto: {describe(chosen)}")
