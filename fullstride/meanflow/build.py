"""From a configuration to its objects: data, network, loss, optimizer."""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fullstride.errors import ConfigError
from fullstride.meanflow.config import LossConfig, ModelConfig, OptimizerConfig, TrainConfig
from fullstride.meanflow.data.digits import digits
from fullstride.meanflow.models.unet import UNet
from fullstride.meanflow.objective import MeanFlowLoss, flow_matching_loss
from fullstride.meanflow.times import TIME_LAWS, BatchTime, TimeLaw


@dataclass(frozen=True)
class Dataset:
    """A labelled image set in two halves, images in [-1, 1]."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    num_classes: int

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(channels, height, width)."""
        c, h, w = self.train_images.shape[1:]
        return c, h, w


def load_data(name: str) -> Dataset:
    """The data set of that name, whole and in memory."""
    loaders = {"digits": (digits, 10)}
    load, num_classes = loaders[name]
    return Dataset(*load("train"), *load("test"), num_classes)


def build_model(config: ModelConfig, image_shape: tuple[int, int, int], num_classes: int) -> UNet:
    """The network for images of that shape.

    Raises:
        ConfigError: if the shape or the widths do not fit the network.

    """
    c, h, w = image_shape
    if h != w:
        raise ConfigError(f"images are {h}x{w}, expected square ones; pad or crop the data")
    try:
        return UNet(
            c,
            h,
            channels=config.channels,
            channel_mult=config.channel_mult,
            num_blocks=config.num_blocks,
            attention_resolutions=config.attention_resolutions,
            dropout=config.dropout,
            time_max_frequency=config.time_max_frequency,
            num_classes=num_classes if config.class_conditional else 0,
        )
    except ValueError as error:
        raise ConfigError(f"model={config.name}: {error}") from None


def build_times(config: LossConfig) -> TimeLaw:
    """The law of (t, r)."""
    values: dict[str, Any] = {
        "mean": config.logit_normal_mean,
        "std": config.logit_normal_std,
        "r_mean": config.r_logit_normal_mean,
        "r_std": config.r_logit_normal_std,
    }
    law = TIME_LAWS[config.time_law]
    times = law(**{k: v for k, v in values.items() if k in inspect.signature(law).parameters})
    return BatchTime(times) if config.use_batch_time else times


def build_loss(config: LossConfig) -> MeanFlowLoss:
    """The objective: MeanFlow, or flow matching for `mse`."""
    times = build_times(config)
    if config.name == "mse":
        return flow_matching_loss(times)
    return MeanFlowLoss(
        ratio=config.meanflow_ratio,
        times=times,
        weighting_power=config.weighting_power,
        weighting_eps=config.weighting_eps,
        split=config.split,
        backend=config.jvp_backend,
    )


def build_optimizer(config: OptimizerConfig, model: nn.Module) -> torch.optim.AdamW:
    """AdamW (arXiv:1711.05101)."""
    return torch.optim.AdamW(
        model.parameters(),
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
    )


def steps_per_epoch(config: TrainConfig, num_images: int) -> int:
    """Optimizer steps of one pass over the data; a last incomplete batch is left out.

    Raises:
        ConfigError: if one optimizer step needs more images than there are.

    """
    effective = config.data.batch_size * config.gradient_accumulation_steps
    if effective > num_images:
        raise ConfigError(
            f"data.batch_size x gradient_accumulation_steps = {effective} images a step, the training half has "
            f"{num_images}; lower one of them"
        )
    return num_images // effective
