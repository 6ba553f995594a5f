"""Commands that convert files: `fullstride meanflow encode` and `export`."""

from pathlib import Path
from typing import Annotated

import typer

from fullstride.cli.options import Device, announce


def encode(
    pictures: Annotated[Path, typer.Argument(help="Folder of images, in the layout of data=image_folder.")],
    vae: Annotated[Path, typer.Option(help="Folder of a diffusers AutoencoderKL, such as sd-vae-ft-mse.")],
    out: Annotated[Path, typer.Option(help="Folder for the latents; an encoding that was stopped continues there.")],
    image_size: Annotated[
        int, typer.Option(min=0, help="Side of the squares that images are cropped to; 0 leaves them uncropped.")
    ] = 256,
    flip: Annotated[bool, typer.Option("--flip", help="Encode mirrored images as well.")] = False,
    half: Annotated[bool, typer.Option("--half", help="Store 16 bits per number.")] = False,
    batch_size: Annotated[int, typer.Option(min=1, help="Number of images per forward pass.")] = 32,
    workers: Annotated[int, typer.Option(min=0, help="Number of processes that decode images.")] = 2,
    holdout: Annotated[float, typer.Option(help="Share held out if the folder has no test/ or val/.")] = 0.1,
    shard_size: Annotated[int, typer.Option(min=1, help="Number of records per file.")] = 10_000,
    device: Device = "auto",
) -> None:
    """Encode pictures as latents, to train on with data=latents.

    Their moments go to train/ and test/ in --out, in shards.
    """
    from fullstride.meanflow.sampling.encode import encode_command

    announce(device)
    encode_command(
        pictures,
        vae=vae,
        out=out,
        image_size=image_size,
        flip=flip,
        half=half,
        batch_size=batch_size,
        workers=workers,
        holdout=holdout,
        shard_size=shard_size,
        device=device,
    )


def export(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="RUN_OR_CHECKPOINT", help="Folder of a run or of a checkpoint.")
    ],
    out: Annotated[Path, typer.Option(help="File to write, ending in .pt2.")],
    steps: Annotated[int, typer.Option(min=1, help="Number of MeanFlow steps.")] = 1,
    ema: Annotated[
        float | None, typer.Option(help="Decay of the averaged weights; by default the run's first.")
    ] = None,
    device: Device = "auto",
) -> None:
    """Write a trained sampler to one file.

    PyTorch alone loads it: torch.export.load(FILE).module()(noise), or (noise, label) if the run has classes.
    """
    from fullstride.meanflow.sampling.export import export_command

    announce(device)
    export_command(checkpoint, out=out, steps=steps, ema=ema, device=device)
