"""Images from a checkpoint: the averaged network and facts about its training data."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fullstride.device.precision import check_precision
from fullstride.device.select import resolve_device
from fullstride.errors import ConfigError, one_of
from fullstride.meanflow.checkpoints.folder import ema_group, find_checkpoint, read_group, read_manifest
from fullstride.meanflow.checkpoints.paces import as_written, averages_of, chosen_average
from fullstride.meanflow.config.commands import SampleOptions
from fullstride.meanflow.config.datasets import noun_of, scale_of
from fullstride.meanflow.config.presets import config_from_dict
from fullstride.meanflow.config.schema import TrainConfig
from fullstride.meanflow.data.tensors import read_conditions
from fullstride.meanflow.sampling import files
from fullstride.meanflow.sampling.autoencoder import Autoencoder, load_autoencoder
from fullstride.meanflow.sampling.graphed import check_backend
from fullstride.meanflow.sampling.guidance_input import with_guidance_input
from fullstride.meanflow.sampling.noise import seeded_labels
from fullstride.meanflow.sampling.samplers import EVALUATIONS, SAMPLERS, SampleResult, sample
from fullstride.meanflow.training.batch_share import all_started, in_parts
from fullstride.meanflow.training.build import build_network, classes_of, in_channels_last
from fullstride.meanflow.training.state import DataFacts
from fullstride.runs.atomic_files import note
from fullstride.runs.next_steps import command, say, show_next_steps
from fullstride.step.torch import Pace

DECODED = 8  # latents that are decoded at a time: each becomes a large picture


@dataclass(frozen=True)
class Generator:
    """A trained generator, ready to sample: the averaged weights in eval mode on `device`."""

    model: nn.Module
    config: TrainConfig
    data: DataFacts
    num_classes: int  # 0 for an unconditional network
    decay: Pace  # of the average
    device: torch.device

    @property
    def image_shape(self) -> tuple[int, ...]:
        """(channels, height, width), or of any rank."""
        return self.data.image_shape


def load_generator(path: Path, device: str = "auto", ema: float | None = None) -> Generator:
    """Load an averaged network of a run's newest whole checkpoint, or of the checkpoint at `path`.

    Args:
        path: a run's folder or a checkpoint's.
        device: auto, cpu, cuda or mps.
        ema: the decay, or relative width, of the average; the run's first unless given.

    Raises:
        ConfigError: if there is no checkpoint, it is damaged, it has no such average, or the device is not there.

    """
    checkpoint, chosen = find_checkpoint(path), resolve_device(device)
    manifest = read_manifest(checkpoint)
    config, data = config_from_dict(manifest["config"]), DataFacts.read(manifest)
    decay = chosen_average(config.ema, ema)
    model = build_network(config, data)
    model.load_state_dict(read_group(checkpoint, ema_group(decay)))
    if config.channels_last:
        in_channels_last(model)
    classes = classes_of(config.model, data.num_classes)
    return Generator(model.to(chosen).eval(), config, data, classes, decay, chosen)


def check_finite(samples: Float[Tensor, "n *s"]) -> Float[Tensor, "n *s"]:
    """The samples themselves.

    Raises:
        FloatingPointError: if one is not finite.

    """
    if bad := int((~samples.isfinite()).flatten(1).any(1).sum()):
        raise FloatingPointError(
            f"{bad} of {len(samples)} samples are not finite: the network diverged; use an earlier checkpoint, or "
            "train with a lower optimizer.lr"
        )
    return samples


def sample_command(checkpoint: Path, options: SampleOptions) -> Path:
    """Write samples: PNG files and grids of them, or latents where a run has no pictures.

    Processes that torchrun has started make a part each; the first one writes.

    Args:
        checkpoint: a run's folder or a checkpoint's.
        options: options of the command; `steps` is None for dopri5.

    Returns:
        The path of the grid, or of latents.safetensors.

    Raises:
        ConfigError: for a checkpoint, sampler, number, label, average or decoder that is not available.
        FloatingPointError: if a sample is not finite.
        OSError: if the folder cannot be written, before anything is sampled where that can be told.

    """
    _check_sampler(options.sampler, options.steps)
    label, vae = options.label, options.vae
    with all_started(options.device) as processes:
        found = processes.led(lambda: find_checkpoint(checkpoint))  # once: the run may go on meanwhile
        generator = load_generator(found, options.device, options.ema)
        generator = replace(generator, model=with_guidance_input(generator.model, generator.config, options))
        check_precision(options.precision, generator.device, "--precision")
        check_backend(options.backend, generator.device, "--backend")
        _check_classes(generator, options)
        classes = 0 if options.no_class else generator.num_classes
        if label is not None and not 0 <= label < classes:
            expected = f"expected one of the run's classes, 0 to {classes - 1}"
            raise ConfigError(f"--label {label}: {expected if classes else 'this run has no classes; leave it out'}")
        noun = noun_of(generator.config.data.name, pixels=generator.data.pixels)
        if vae is not None and noun != "latents":
            kind = "pictures" if generator.data.pixels else noun
            raise ConfigError(f"--vae {vae}: the run generates {kind}, not latents; leave it out")
        conditions = _conditions(generator, options)
        # Before hours of sampling; the first process decodes.
        load = lambda: load_autoencoder(vae, generator.device) if vae and processes.leads else None  # noqa: E731
        decoder = processes.agreed(load)
        made = {"checkpoint": str(found)} | _chosen(
            options, "sampler", "steps", "seed", "num", "label", "guidance", "no_class"
        )
        made |= {"ema": as_written(generator.decay)} | _chosen(options, "precision", "backend")
        made |= {"vae": str(vae)} if vae else {}
        made |= _chosen(options, "omega", "omega_start", "omega_end") if options.omega is not None else {}
        made |= {"conditions": str(options.conditions)} if options.conditions else {}
        place = options.out or files.default_place(found, made, as_written(averages_of(generator.config.ema)[0]))

        def check() -> None:
            with _told(place):
                files.check_place(place)

        processes.led(check)
        chosen = _chosen(options, "sampler", "steps", "seed", "guidance", "batch_size", "precision", "backend")
        chosen |= {"num_classes": classes}
        result = in_parts(lambda own: _sampled(generator, own, label, conditions, **chosen), options.num, processes)
        if result is None:
            return processes.led(lambda: place)  # the first one writes
        drawn = options.seed if classes and label is None else None
        path = processes.led(lambda: _write(result, generator, made | {"nfe": result.nfe}, drawn, place, decoder))
        if processes.leads:
            show_next_steps(
                {path: "grid of the first samples" if path.name == files.GRID else "all samples"},
                {command("meanflow", "evaluate", checkpoint): "score samples of the same weights"},
            )
        return path


def _chosen(options: SampleOptions, *names: str) -> dict[str, Any]:
    return {name: getattr(options, name) for name in names}


@contextmanager
def _told(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OSError(f"--out {out}: cannot be written ({error.strerror or error})") from error


def _check_sampler(sampler: str, steps: int | None) -> None:
    """Check the sampler and its steps before anything is loaded."""
    one_of("--sampler", sampler, SAMPLERS)
    if steps is None and sampler in EVALUATIONS:
        each = EVALUATIONS[sampler]
        raise ConfigError(
            f"--sampler {sampler} without --steps: expected a number of steps, of {each} network evaluation"
            f"{'s' * (each > 1)} each, such as --steps 50; or --sampler dopri5, which chooses its own"
        )
    if steps is not None and sampler not in EVALUATIONS:
        raise ConfigError(f"--sampler {sampler} --steps {steps}: this sampler chooses its own steps; leave --steps out")


def _check_classes(generator: Generator, options: SampleOptions) -> None:
    """Check that a run has what guidance and 'no class' take: classes, and labels that were dropped in training."""
    given = f"--guidance {options.guidance:g}" if options.guidance != 1 else "--no-class" if options.no_class else ""
    if not given:
        return
    if options.no_class and (options.guidance != 1 or options.label is not None):
        other = "--guidance" if options.guidance != 1 else "--label"
        raise ConfigError(f"--no-class with {other}: expected one of them, as no class is neither guided nor named")
    if not generator.num_classes:
        raise ConfigError(f"{given}: this run has no classes; leave it out")
    loss = generator.config.loss
    if not loss.label_dropout:
        raise ConfigError(
            f"{given}: the run was trained with loss.label_dropout=0, so that 'no class' means nothing to its network; "
            "leave it out, or train with loss.label_dropout=0.1"
        )
    if options.guidance != 1 and loss.guided:
        note(f"{given}: the run's target was guided already (loss.omega={loss.omega:g} loss.kappa={loss.kappa:g})")


def _conditions(generator: Generator, options: SampleOptions) -> Tensor | None:
    """The condition of each sample: those of the file in turn."""
    shape, file = generator.data.condition_shape, options.conditions
    if not shape and file is None:
        return None
    if not shape or file is None:
        given = f"--conditions {file}: this run has none; leave it out" if file else "no --conditions FILE"
        raise ConfigError(f"{given}; expected conditions of shape {shape}" if shape else given)
    if options.backend == "graph":
        raise ConfigError("--backend graph with --conditions: expected eager or auto")
    found = read_conditions(file, shape)
    return found[torch.arange(options.num) % len(found)]


def _sampled(
    generator: Generator, own: range, label: int | None, conditions: Tensor | None, **chosen: Any
) -> SampleResult:
    """Images of these indices, all of them finite."""
    try:
        result = sample(
            generator.model,
            num=len(own),
            start=own.start,
            shape=generator.image_shape,
            label=label,
            condition=None if conditions is None else conditions[own.start : own.stop],
            device=generator.device,
            **chosen,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None
    check_finite(result.images)
    return result


def _write(
    result: SampleResult,
    generator: Generator,
    made: dict[str, Any],
    seed: int | None,
    out: Path,
    decoder: Autoencoder | None,
) -> Path:
    """Samples and what they were made with; `seed` where labels were drawn by it."""
    num = len(result.images)
    classes = None if seed is None else seeded_labels(seed, 0, num, generator.num_classes)
    noun = noun_of(generator.config.data.name, pixels=generator.data.pixels)
    name = files.LATENTS if noun == "latents" else files.TENSORS
    with _told(out):
        if generator.data.pixels:
            files.replace_set(out, made, lambda part: files.write_pictures(part, [result.images], classes))
        else:
            # Latents, which stay if they cannot be decoded, then pictures of them.
            latents = result.images / scale_of(generator.config.data)
            tensors = {"latents" if name == files.LATENTS else "samples": latents}
            tensors |= {} if classes is None else {"labels": classes}
            files.replace_set(out, made, lambda part: files.write_tensors(part / name, tensors))
            if decoder is not None:
                pictures = (decoder.pictures(some) for some in latents.split(DECODED))
                files.add_to_set(out, lambda part: files.write_pictures(part, pictures, classes))
    plural = "s" if result.nfe != 1 else ""
    say(f"{num} {'samples' if noun == 'samples' else 'images'}, {result.nfe:g} network evaluation{plural} each: {out}")
    return out / (files.GRID if generator.data.pixels or decoder is not None else name)
