"""Commands that make files of one kind of files of another: `fullstride meanflow encode` and `export`."""

from pathlib import Path
from typing import Annotated

import typer

from fullstride.cli.options import Device, announce


def encode(
    pictures: Annotated[Path, typer.Argument(help="Folder of pictures, as data=image_folder takes it.")],
    vae: Annotated[Path, typer.Option(help="Folder of a diffusers AutoencoderKL, such as sd-vae-ft-mse.")],
    out: Annotated[Path, typer.Option(help="Folder for the latents; an encoding that was stopped goes on.")],
    image_size: Annotated[
        int, typer.Option(min=0, help="Side of the squares that pictures are cropped to; 0 takes them as they are.")
    ] = 256,
    flip: Annotated[bool, typer.Option("--flip", help="Encode the mirrored pictures, too.")] = False,
    half: Annotated[bool, typer.Option("--half", help="Keep 16 bits a number.")] = False,
    batch_size: Annotated[int, typer.Option(min=1, help="Pictures of one forward pass.")] = 32,
    workers: Annotated[int, typer.Option(min=0, help="Processes that decode pictures.")] = 2,
    holdout: Annotated[float, typer.Option(help="Share held out where the folder has no test/ or val/.")] = 0.1,
    shard_size: Annotated[int, typer.Option(min=1, help="Records a file.")] = 10_000,
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
    checkpoint: Annotated[Path, typer.Argument(metavar="RUN_OR_CHECKPOINT", help="A run's folder or a checkpoint's.")],
    out: Annotated[Path, typer.Option(help="The file, which ends in .pt2.")],
    steps: Annotated[int, typer.Option(min=1, help="Of MeanFlow.")] = 1,
    ema: Annotated[
        float | None, typer.Option(help="Decay of the averaged weights; the run's first unless given.")
    ] = None,
    device: Device = "auto",
) -> None:
    """Write a trained sampler to one file.

    PyTorch alone loads it: torch.export.load(FILE).module()(noise), or (noise, label) where the run has classes.
    """
    from fullstride.meanflow.sampling.export import export_command

    announce(device)
    export_command(checkpoint, out=out, steps=steps, ema=ema, device=device)
