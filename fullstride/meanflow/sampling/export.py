"""`fullstride meanflow export`: a trained sampler as one file that PyTorch alone loads, `torch.export.load(FILE)`."""

import json
import warnings
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor, nn

from fullstride.device.precision import exact_fp32
from fullstride.errors import ConfigError
from fullstride.jvp.implementation import only_plain
from fullstride.meanflow.checkpoints.folder import find_checkpoint
from fullstride.meanflow.checkpoints.paces import as_written
from fullstride.meanflow.config.commands import ExportOptions
from fullstride.meanflow.config.datasets import scale_of
from fullstride.meanflow.sampling.generate import Generator, load_generator
from fullstride.meanflow.sampling.noise import seeded_noise
from fullstride.meanflow.sampling.samplers import meanflow_sample

SUFFIX = ".pt2"
ABOUT = "fullstride.json"
CHECKED = 3  # images by which the file is compared with the network; not 1, which would be taken for the only number
# Of the largest number; other kernels add in another order, through some 60 layers.
TOLERANCE = 1e-4


class ExportedSampler(nn.Module):
    """From noise, and labels where there are classes, to pictures in [-1, 1] or unscaled latents."""

    def __init__(self, generator: Generator, steps: int):
        """Take the averaged network."""
        super().__init__()
        self.network, self.steps = generator.model, steps
        self.scale = scale_of(generator.config.data)

    def forward(self, noise: Tensor, label: Tensor | None = None) -> Tensor:
        """MeanFlow's steps; pictures are not clipped."""
        return meanflow_sample(self.network, noise, steps=self.steps, label=label).images / self.scale


def export_command(checkpoint: Path, options: ExportOptions) -> None:
    """Write the sampler of a run to one file, and compare what the file gives with what the network gives.

    Its inputs are noise (n, c, h, w) in fp32 for any n, and for a class-conditional network labels (n,), int64.

    Args:
        checkpoint: a run's folder or a checkpoint's.
        options: options of the command; `steps` are unrolled in the file, which is for `device`.

    Raises:
        ConfigError: for a checkpoint, average or file name that cannot be.
        RuntimeError: if the file gives other images than the network.
        OSError: if it cannot be written.

    """
    out = options.out
    if out.suffix != SUFFIX or out.is_dir():
        kind = "a folder, " if out.suffix == SUFFIX else ""
        raise ConfigError(f"--out {out}: {kind}expected a file's name that ends in {SUFFIX}")
    found = find_checkpoint(checkpoint)
    generator = load_generator(found, options.device, options.ema)
    if generator.data.condition_shape:
        raise ConfigError(
            f"{found}: its network takes conditions, expected one without; sample with fullstride instead"
        )
    # The order of the run's memory is no part of the file, which PyTorch writes whole of contiguous weights alone.
    generator.model.to(memory_format=torch.contiguous_format)  # pyright: ignore[reportCallIssue]
    sampler = ExportedSampler(generator, options.steps).eval()
    noise = seeded_noise(0, 0, CHECKED, generator.image_shape, generator.device)
    label = torch.arange(CHECKED, device=generator.device) % max(1, generator.num_classes)
    given = (noise, label) if generator.num_classes else (noise,)
    about = {
        "checkpoint": found.name,
        "ema": as_written(generator.decay),
        "steps": options.steps,
        "shape": list(generator.image_shape),
        "num_classes": generator.num_classes,
        "pictures": generator.data.pixels,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(f".writing_{out.name}")
    try:
        with torch.no_grad(), only_plain(), exact_fp32(generator.device), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # PyTorch's, of itself
            sizes = tuple({0: torch.export.Dim("n", min=1)} for _ in given)
            program = torch.export.export(sampler, given, dynamic_shapes=sizes)
            # What is left of this package in the graph are ways to take a derivative, which PyTorch's own operations
            # replace.
            torch.export.save(program.run_decompositions({}), part, extra_files={ABOUT: json.dumps(about)})
            _check(sampler, given, part)
        part.replace(out)
    finally:
        part.unlink(missing_ok=True)
    names = "noise, label" if generator.num_classes else "noise"
    Console().print(f"exported: {out}; torch.export.load({str(out)!r}).module()({names})", markup=False, soft_wrap=True)


def _check(sampler: nn.Module, given: tuple[Tensor, ...], path: Path) -> None:
    """Compare file and network on another number of images than the file was made with."""
    given = tuple(x[:-1] for x in given)
    found, right = torch.export.load(path).module()(*given), sampler(*given)
    if not (error := (found - right).abs().max()) <= TOLERANCE * right.abs().max():
        raise RuntimeError(
            f"the exported sampler gives different images than the network, by up to {error.item():.2g} of "
            f"{right.abs().max().item():.2g}; sample with fullstride instead"
        )
