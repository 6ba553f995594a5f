"""Images from a checkpoint: the averaged network and what it was trained on."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from PIL import Image
from rich.console import Console
from torch import Tensor, nn

from fullstride.device import resolve_device
from fullstride.errors import ConfigError
from fullstride.files import replace_file
from fullstride.meanflow.build import augment_dim, build_model
from fullstride.meanflow.checkpoint import read_group, read_manifest, save_tensors
from fullstride.meanflow.checkpoints import find_checkpoint
from fullstride.meanflow.config import TrainConfig
from fullstride.meanflow.data.pixels import to_uint8
from fullstride.meanflow.grids import save_grid
from fullstride.meanflow.noise import seeded_labels
from fullstride.meanflow.presets import config_from_dict
from fullstride.meanflow.samplers import SampleResult, sample
from fullstride.meanflow.share import all_started, in_parts
from fullstride.meanflow.state import DataFacts, ema_group


@dataclass(frozen=True)
class Generator:
    """A trained generator, ready to sample: the averaged weights in eval mode on `device`."""

    model: nn.Module
    config: TrainConfig
    data: DataFacts
    num_classes: int  # 0 for an unconditional network
    device: torch.device

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(channels, height, width)."""
        return self.data.image_shape


def load_generator(path: Path, device: str = "auto", ema: float | None = None) -> Generator:
    """Load an averaged network of a run's newest whole checkpoint, or of the checkpoint at `path`.

    Args:
        path: a run's folder or a checkpoint's.
        device: auto, cpu, cuda or mps.
        ema: the decay of the average; the run's first unless given.

    Raises:
        ConfigError: if there is no checkpoint, it is damaged, it has no such average, or the device is not there.

    """
    checkpoint, chosen = find_checkpoint(path), resolve_device(device)
    manifest = read_manifest(checkpoint)
    config, data = config_from_dict(manifest["config"]), DataFacts.read(manifest)
    decay = config.ema.decays[0] if ema is None else ema
    if decay not in config.ema.decays:
        raise ConfigError(
            f"--ema {decay}: expected one of {', '.join(map(str, config.ema.decays))}, the run's averages"
        )
    model = build_model(config.model, data.image_shape, data.num_classes, augment_dim(config.data))
    model.load_state_dict(read_group(checkpoint, ema_group(decay)))
    classes = data.num_classes if config.model.class_conditional else 0
    return Generator(model.to(chosen).eval(), config, data, classes, chosen)


def check_finite(samples: Float[Tensor, "n c h w"]) -> Float[Tensor, "n c h w"]:
    """The samples themselves.

    Raises:
        FloatingPointError: if one is not finite.

    """
    if bad := int((~samples.isfinite()).flatten(1).any(1).sum()):
        raise FloatingPointError(
            f"{bad} of {len(samples)} samples are not finite: the network diverged; take an earlier checkpoint, or "
            "train with a lower optimizer.lr"
        )
    return samples


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
    precision: str = "fp32",
    ema: float | None = None,
    vae: Path | None = None,
) -> Path:
    """Write `num` samples to `out`: PNG files and grids of them, or latents where a run has no pictures.

    Processes that torchrun has started make a part each; the first one writes.

    Args:
        checkpoint: a run's folder or a checkpoint's.
        sampler: a name in `SAMPLERS`.
        steps: number of steps; None for dopri5.
        num: number of samples.
        seed: sample i depends on the seed and i alone.
        label: one class for all; balanced classes if None.
        out: folder, made if need be.
        batch_size: samples of one forward pass.
        device: auto, cpu, cuda or mps.
        precision: of the network's products: fp32, tf32 or bf16.
        ema: decay of the average to use; the run's first if None.
        vae: folder of a diffusers AutoencoderKL that turns latents into pictures.

    Returns:
        The path of the grid, or of latents.safetensors.

    Raises:
        ConfigError: for a checkpoint, sampler, number, label, average or decoder that cannot be.
        FloatingPointError: if a sample is not finite.

    """
    with all_started(device) as processes:
        found = processes.led(lambda: find_checkpoint(checkpoint))  # once: the run may go on meanwhile
        generator = load_generator(found, device, ema)
        if vae is not None and generator.data.pixels:
            raise ConfigError(f"--vae {vae}: the run generates pictures, not latents; leave it out")
        chosen = {"sampler": sampler, "steps": steps, "seed": seed, "batch_size": batch_size, "precision": precision}
        result = in_parts(lambda own: _sampled(generator, own, label, **chosen), num, processes)
        if result is None:
            return processes.led(lambda: out)  # the first one writes
        made = {"checkpoint": str(checkpoint), "sampler": sampler, "steps": steps, "seed": seed, "num": num}
        made |= {
            "nfe": result.nfe,
            "precision": precision,
            "label": label,
            "ema": generator.config.ema.decays[0] if ema is None else ema,
        }
        drawn = seed if generator.num_classes and label is None else None
        return processes.led(lambda: _write(result, generator, made, drawn, out, vae))


def _sampled(generator: Generator, own: range, label: int | None, **chosen: Any) -> SampleResult:
    """Images of these indices, all of them finite."""
    try:
        result = sample(
            generator.model,
            num=len(own),
            start=own.start,
            shape=generator.image_shape,
            label=label,
            num_classes=generator.num_classes,
            device=generator.device,
            **chosen,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None
    check_finite(result.images)
    return result


def _write(
    result: SampleResult, generator: Generator, made: dict[str, Any], seed: int | None, out: Path, vae: Path | None
) -> Path:
    """Samples and what they were made with; `seed` where labels were drawn by it."""
    num = len(result.images)
    classes = None if seed is None else seeded_labels(seed, 0, num, generator.num_classes)
    try:
        out.mkdir(parents=True, exist_ok=True)
        _forget_earlier(out)
        replace_file(out / "samples.json", json.dumps(made, indent=1) + "\n")
        path = _write_samples(result.images, generator, classes, out, vae)
    except OSError as error:
        raise OSError(f"--out {out}: cannot write there ({error.strerror or error})") from error
    Console().print(f"{num} images, {result.nfe:g} network evaluations each: {out}")
    return path


def _forget_earlier(out: Path) -> None:
    """Remove the samples of an earlier call, of which more might be there than are written now: one set, one folder."""
    try:
        earlier = int(json.loads((out / "samples.json").read_text())["num"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return  # none of this program's
    for name in (*(f"{index:06d}.png" for index in range(earlier)), "classes.png", "grid.png", "latents.safetensors"):
        (out / name).unlink(missing_ok=True)


def _write_samples(images: Tensor, generator: Generator, classes: Tensor | None, out: Path, vae: Path | None) -> Path:
    """Latents, if these are none that a decoder turns into pictures, and pictures."""
    if not generator.data.pixels:
        latents = images / generator.config.data.latent_scale
        save_tensors({"latents": latents}, out / "latents.safetensors")
        if vae is None:
            return out / "latents.safetensors"
        images = decode_latents(latents, vae, generator.device)
    return _write_pictures(images, classes, out)


def _write_pictures(images: Tensor, classes: Tensor | None, out: Path) -> Path:
    """A PNG each, a grid of up to 256, and for several classes a grid with a row for each of the first ten."""
    for index, pixels in enumerate(to_uint8(images)):
        array = pixels.permute(1, 2, 0).numpy()
        Image.fromarray(array[:, :, 0] if array.shape[2] == 1 else array).save(out / f"{index:06d}.png")
    if classes is not None:
        rows = [images[classes == c] for c in classes.unique().tolist()[:10]]
        columns = min(10, *(len(row) for row in rows))
        captions = [str(c) for c in classes.unique().tolist()[:10]]
        save_grid(
            torch.cat([row[:columns] for row in rows]), out / "classes.png", columns=columns, row_captions=captions
        )
    grid = out / "grid.png"
    save_grid(images[:256], grid, columns=max(1, round(min(len(images), 256) ** 0.5)))
    return grid


@torch.no_grad()
def decode_latents(latents: Float[Tensor, "n c h w"], vae: Path, device: torch.device) -> Float[Tensor, "n 3 H W"]:
    """Pictures of unscaled latents through a KL autoencoder in diffusers' layout, such as sd-vae-ft-mse.

    Raises:
        ConfigError: if diffusers is not installed or the folder holds no such autoencoder.

    """
    try:
        from diffusers import AutoencoderKL  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError:
        raise ConfigError(f"--vae {vae}: diffusers is not installed; run: pip install diffusers") from None
    try:
        decoder = AutoencoderKL.from_pretrained(vae, local_files_only=True).to(device).eval()
    except OSError as error:
        raise ConfigError(f"--vae {vae}: no autoencoder in diffusers' layout ({error})") from None
    return torch.cat([decoder.decode(part.to(device)).sample.float().cpu() for part in latents.split(8)])
