"""The pretrained flow of a run that learns from one: checked first, loaded, and recognised on resuming."""

import json
from pathlib import Path
from typing import Any

from fullstride.errors import ConfigError
from fullstride.meanflow.checkpoints.folder import ema_group, find_checkpoint, read_manifest
from fullstride.meanflow.checkpoints.paces import as_written, chosen_average
from fullstride.meanflow.config.objectives import OBJECTIVES
from fullstride.meanflow.config.presets import config_from_dict
from fullstride.meanflow.config.schema import TrainConfig
from fullstride.meanflow.data.dataset import Dataset
from fullstride.meanflow.objective.teacher import Teacher
from fullstride.meanflow.sampling.generate import load_generator
from fullstride.meanflow.training.build import augment_dim, classes_of
from fullstride.meanflow.training.state import DataFacts
from fullstride.runs.atomic_files import replace_file
from fullstride.runs.folder import folder_of
from fullstride.step.torch import Pace

RECORD = "teacher.json"  # in the run's folder: the weights that it learns from


def _place(config: TrainConfig) -> Path:
    return Path(config.loss.teacher).expanduser()


def _checkpoint(config: TrainConfig) -> tuple[Path, dict[str, Any]]:
    """The teacher's checkpoint and its manifest."""
    place, run = _place(config), folder_of(config)
    if place.resolve().is_relative_to(run.resolve()):
        raise ConfigError(f"loss.teacher={place}: in the folder of this very run; use another run_name")
    if not place.is_dir():
        raise ConfigError(f"loss.teacher={place}: no such folder; expected a trained run (runs/NAME) or its checkpoint")
    checkpoint = find_checkpoint(place)
    return checkpoint, read_manifest(checkpoint)


def _average(config: TrainConfig, teacher: TrainConfig) -> Pace:
    return chosen_average(teacher.ema, config.loss.teacher_ema or None, "loss.teacher_ema", "the teacher's")


def check_teacher(config: TrainConfig, data: Dataset) -> None:
    """Check that the teacher of a run, if it has one, is a flow over the same samples, under the same labels.

    Raises:
        ConfigError: for a checkpoint that is no such flow, or another one than the run began with.

    """
    if not config.loss.taught:
        return
    checkpoint, manifest = _checkpoint(config)
    teacher, facts = config_from_dict(manifest["config"]), DataFacts.read(manifest)
    own = DataFacts.of(data)
    compared = {
        "samples of": (facts.image_shape, own.image_shape),
        "pictures, not latents:": (facts.pixels, own.pixels),
        "data.latent_scale": (teacher.data.latent_scale, config.data.latent_scale),
        "number of classes that the network takes": (
            classes_of(teacher.model, facts.num_classes),
            classes_of(config.model, own.num_classes),
        ),
        "length of augmentation labels": (
            augment_dim(teacher.data) if augment_dim(config.data) else 0,
            augment_dim(config.data),
        ),
        "conditions of": (facts.condition_shape, own.condition_shape),
    }
    for what, (found, expected) in compared.items():
        if found != expected:
            raise ConfigError(f"loss.teacher={checkpoint}: {what} {found}, expected {expected}, as in this run")
    _check_flow(checkpoint, teacher)
    if config.loss.teacher_guidance != 1 and teacher.loss.label_dropout == 0:
        raise ConfigError(
            f"loss.teacher_guidance={config.loss.teacher_guidance}: the teacher never saw 'no class' "
            "(loss.label_dropout=0); expected 1, or a teacher with label_dropout"
        )
    _check_same(config, _identity(manifest, _average(config, teacher)))


def _check_flow(checkpoint: Path, teacher: TrainConfig) -> None:
    """Refuse a network whose u(z, t, t) was never trained to be the velocity."""
    loss = teacher.loss
    row = OBJECTIVES.get(loss.name)
    if (row is not None and not row.velocity) or loss.meanflow_ratio == 1:
        raise ConfigError(
            f"loss.teacher={checkpoint}: trained with loss={loss.name} meanflow_ratio={loss.meanflow_ratio}, which "
            "never sees r = t; expected a flow, such as one of loss=mse"
        )


def _identity(manifest: dict[str, Any], average: Pace) -> dict[str, Any]:
    weights = manifest["files"][f"{ema_group(average)}.safetensors"]
    return {"step": manifest["step"], "ema": as_written(average), "sha256": weights}


def _check_same(config: TrainConfig, found: dict[str, Any]) -> None:
    record = folder_of(config) / RECORD
    if config.resume and record.is_file() and (begun := json.loads(record.read_text())) != found:
        raise ConfigError(
            f"loss.teacher={config.loss.teacher}: weights of step {found['step']}, average {found['ema']}, but the run "
            f"began with those of step {begun['step']}, average {begun['ema']}; name that checkpoint"
        )


def load_teacher(config: TrainConfig, device: str) -> Teacher | None:
    """The pretrained flow of a run, frozen, on `device`; None for a run without one.

    Raises:
        ConfigError: if the checkpoint is damaged.

    """
    if not config.loss.taught:
        return None
    generator = load_generator(_checkpoint(config)[0], device, config.loss.teacher_ema or None)
    return Teacher(
        generator.model.requires_grad_(False),
        generator.num_classes,
        config.loss.teacher_guidance,
        config.loss.guidance_start,
        config.loss.guidance_end,
    )


def write_teacher(run: Path, config: TrainConfig) -> None:
    """Leave in a run's folder which weights it learns from.

    Raises:
        OSError: if it cannot be written.

    """
    if config.loss.taught and not (run / RECORD).exists():
        manifest = _checkpoint(config)[1]
        identity = _identity(manifest, _average(config, config_from_dict(manifest["config"])))
        replace_file(run / RECORD, json.dumps(identity, indent=1) + "\n")
