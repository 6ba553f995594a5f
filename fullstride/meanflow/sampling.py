"""Images from a checkpoint: the averaged network and what it was trained on."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from rich.console import Console

from fullstride.device import resolve_device
from fullstride.errors import ConfigError
from fullstride.meanflow.build import build_model
from fullstride.meanflow.checkpoint import find_checkpoint, read_group, read_manifest
from fullstride.meanflow.config import TrainConfig, config_from_dict
from fullstride.meanflow.data.pixels import to_uint8
from fullstride.meanflow.grids import save_grid
from fullstride.meanflow.models.unet import UNet
from fullstride.meanflow.samplers import sample


@dataclass(frozen=True)
class Generator:
    """A trained generator, ready to sample: the averaged weights in eval mode on `device`."""

    model: UNet
    config: TrainConfig
    image_shape: tuple[int, int, int]
    num_classes: int  # 0 for an unconditional network
    device: torch.device


def load_generator(path: Path, device: str = "auto") -> Generator:
    """Load the averaged network of a run's newest checkpoint, or of the checkpoint at `path`.

    Raises:
        ConfigError: if there is no checkpoint, it is damaged, or the device is not there.

    """
    checkpoint, chosen = find_checkpoint(path), resolve_device(device)
    manifest = read_manifest(checkpoint)
    config = config_from_dict(manifest["config"])
    c, h, w = manifest["image_shape"]
    model = build_model(config.model, (c, h, w), manifest["num_classes"])
    model.load_state_dict(read_group(checkpoint, "ema"))
    classes = manifest["num_classes"] if config.model.class_conditional else 0
    return Generator(model.to(chosen).eval(), config, (c, h, w), classes, chosen)


def sample_command(
    checkpoint: Path,
    *,
    sampler: str,
    steps: int | None,
    num: int,
    seed: int,
    label: int | None,
    out: Path,
    batch_size: int,
    device: str,
) -> Path:
    """Write `num` images as PNG files and a grid of them to `out`, and return the grid's path.

    Raises:
        ConfigError: for a checkpoint, sampler, number or label that cannot be.

    """
    generator = load_generator(checkpoint, device)
    try:
        result = sample(
            generator.model,
            sampler=sampler,
            steps=steps,
            num=num,
            shape=generator.image_shape,
            seed=seed,
            label=label,
            num_classes=generator.num_classes,
            batch_size=batch_size,
            device=generator.device,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None
    out.mkdir(parents=True, exist_ok=True)
    for index, pixels in enumerate(to_uint8(result.images)):
        array = pixels.permute(1, 2, 0).numpy()
        Image.fromarray(array[:, :, 0] if array.shape[2] == 1 else array).save(out / f"{index:06d}.png")
    grid = out / "grid.png"
    save_grid(result.images[:256], grid, columns=max(1, round(min(num, 256) ** 0.5)))
    made = {
        "checkpoint": str(checkpoint),
        "sampler": sampler,
        "steps": steps,
        "seed": seed,
        "num": num,
        "nfe": result.nfe,
    }
    (out / "samples.json").write_text(json.dumps(made | {"label": label}, indent=1) + "\n")
    Console().print(f"{num} images, {result.nfe:g} network evaluations each: {out}")
    return grid
