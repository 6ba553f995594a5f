"""The function that a run minimises, of a configuration and its data."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fullstride.errors import ConfigError
from fullstride.meanflow.config.losses import CLASSIFIER, PerceptualConfig
from fullstride.meanflow.config.schema import LossConfig, TrainConfig
from fullstride.meanflow.data.dataset import Dataset
from fullstride.meanflow.data.edm_augment import EdmAugment
from fullstride.meanflow.evaluation.preflight import can_classify
from fullstride.meanflow.metrics.reference import reference_classifier
from fullstride.meanflow.objective.derivative import labelled
from fullstride.meanflow.objective.loss import MeanFlowLoss, loss_of
from fullstride.meanflow.objective.perceptual import Maps
from fullstride.meanflow.objective.split import can_share
from fullstride.meanflow.objective.teacher import Teacher
from fullstride.meanflow.training.step import RecordObjective
from fullstride.settings.overrides import is_import_path, load_object
from fullstride.step.torch import Averages


def build_loss(config: LossConfig, num_classes: int = 0, averages: Averages | None = None, **own: Any) -> MeanFlowLoss:
    """The objective of a configuration, with a teacher or features of its own; see `MeanFlowLoss.build`."""
    return loss_of(config).build(config, num_classes, averages, **own)


def features_of(name: str, data: Dataset, device: torch.device) -> Callable[[Tensor], Maps]:
    """The frozen network whose features an objective compares, by name.

    Raises:
        ConfigError: for data that are no pictures, a classifier without classes, or a name of no network.

    """
    if not data.pixels:
        raise ConfigError(f"loss=perceptual data={data.name}: expected pictures, which latents are not; use loss=imf")
    if name == CLASSIFIER:
        if not can_classify(data):
            raise ConfigError(
                f"loss.features={name} data={data.name}: expected pictures of several classes, at least 8x8; name a "
                "network of features, package.module:Class"
            )
        return reference_classifier(data, device).maps
    made = load_object(name, "loss.features")
    if not (isinstance(made, type) and issubclass(made, nn.Module)):
        raise ConfigError(f"loss.features={name}: expected a class of torch.nn.Module, made without arguments")
    return made().to(device).eval().requires_grad_(False)


def build_objective(
    config: TrainConfig, data: Dataset, averages: Averages, teacher: Teacher | None = None
) -> RecordObjective:
    """Build the function that a run minimises on its batches."""
    own: dict[str, Any] = {} if teacher is None else {"teacher": teacher}
    if isinstance(config.loss, PerceptualConfig):
        own["features"] = features_of(config.loss.features, data, next(averages.model.parameters()).device)
    objective = RecordObjective(
        build_loss(config.loss, data.num_classes, averages, **own),
        data.decode,
        hflip=config.data.hflip and data.pixels,
        augment=EdmAugment(config.data.augment) if config.data.augment > 0 else None,
        conditional=config.model.class_conditional,
        condition=data.condition,
    )
    unknown = is_import_path(config.model.name) and config.loss.split == "auto" and config.distributed == "none"
    if unknown and objective.meanflow.split == "shared" and not _shares(objective, averages.model, data):
        return replace(objective, meanflow=replace(objective.meanflow, split="static"))
    return objective


def _shares(objective: RecordObjective, network: nn.Module, data: Dataset) -> bool:
    """Try the shared pass with a network of another package, on two records."""
    device, few = next(network.parameters()).device, torch.arange(min(2, len(data.train)))
    generator = torch.Generator(device).manual_seed(0)
    x, conditions = objective.inputs(data.train.read(few).to(device), generator)
    e, t, _ = objective.meanflow.draw(x, generator)
    conditions |= labelled(data.train.labels[few].to(device) if objective.conditional else None)
    return can_share(network, x, t / 2, t, e - x, conditions | objective.meanflow.draw_inputs(x, t, t / 2, generator))
