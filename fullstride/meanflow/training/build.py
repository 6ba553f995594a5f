"""From a configuration to its objects: network, loss, optimizer, state, inputs."""

from dataclasses import fields
from pathlib import Path

import torch
from torch import nn

from fullstride.errors import ConfigError
from fullstride.meanflow.checkpoints.paces import averages_of
from fullstride.meanflow.checkpoints.start import begin
from fullstride.meanflow.config.intervals import save_interval
from fullstride.meanflow.config.networks import ModelConfig
from fullstride.meanflow.config.schema import DataConfig, TrainConfig
from fullstride.meanflow.data.dataset import Dataset
from fullstride.meanflow.data.edm_augment import EdmAugment
from fullstride.meanflow.models.common import recompute
from fullstride.meanflow.models.x_prediction import XPrediction
from fullstride.meanflow.training.guard import Guard
from fullstride.meanflow.training.optimizers import build_optimizer, description
from fullstride.meanflow.training.state import DataFacts, Position, RunState
from fullstride.process.exit_codes import STUCK
from fullstride.process.gpu_activity import GpuActivity
from fullstride.process.watchdog import Verdict, Watchdog, WatchdogLimits
from fullstride.runs.atomic_files import note
from fullstride.runs.early_ends import write_end
from fullstride.settings.overrides import load_object
from fullstride.step.torch import SINGLE, Averages, Processes, Shards


def classes_of(config: ModelConfig, num_classes: int) -> int:
    """Number of classes that a network takes labels of; 0 for an unconditional one."""
    return num_classes if config.class_conditional else 0


def build_model(
    config: ModelConfig,
    image_shape: tuple[int, ...],
    num_classes: int,
    *,
    augment_dim: int = 0,
    condition_shape: tuple[int, ...] = (),
) -> nn.Module:
    """The network for inputs of that shape.

    Args:
        config: the configuration of a network.
        image_shape: (channels, height, width); of any rank for a network that takes any shape.
        num_classes: number of classes of the data.
        augment_dim: length of EDM's augmentation labels; 0 without them.
        condition_shape: of a condition, (length,) or (tokens, length) of a sequence; () without conditions.

    Raises:
        ConfigError: if the shape, the widths or the classes do not fit the network, or it has no blocks to recompute.

    """
    c, *sizes = image_shape
    square = len(sizes) == 2 and sizes[0] == sizes[1]
    if not square and not config.any_shape:
        if len(sizes) == 2:
            raise ConfigError(f"images are {sizes[0]}x{sizes[1]}, expected square ones; set data.image_size")
        raise ConfigError(
            f"model={config.name} with samples of shape {tuple(image_shape)}: expected square pictures; use "
            "model=token_dit"
        )
    if condition_shape and not config.conditioned:
        raise ConfigError(
            f"model={config.name} with data that have conditions: expected a network that is made with condition_shape "
            "and called with condition, such as model=token_dit; or remove the conditions from the data"
        )
    if config.class_conditional and num_classes == 0:
        raise ConfigError("model.class_conditional=true: the data has no labels; leave it out, or use labelled data")
    common = {field.name for field in fields(ModelConfig)}
    keys = {k: v for k, v in vars(config).items() if k not in common}
    keys |= {"augment_dim": augment_dim} if augment_dim else {}
    keys |= {"condition_shape": condition_shape} if condition_shape else {}
    try:
        made, size = load_object(config.network, "model"), sizes[0] if square else tuple(sizes)
        network = made(c, size, num_classes=classes_of(config, num_classes), **keys)
    except ValueError as error:
        raise ConfigError(f"model={config.name}: {error}") from None
    if config.prediction == "x":
        network = XPrediction(network)
    if config.recompute and not recompute(network):
        raise ConfigError(
            f"model.recompute=true model={config.name}: expected a network with blocks that have an attribute "
            "recompute=False and are called by `through`, found none; add such blocks, or leave model.recompute out"
        )
    return network


def in_channels_last(model: nn.Module) -> nn.Module:
    """The network with its images' and filters' channels side by side in memory; the same function.

    Convolutions hand the order of their filters on to what they return, so the inputs need not be in it.
    """
    return model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]


def augment_dim(config: DataConfig) -> int:
    """Length of the augmentation labels of a run; 0 without them."""
    return EdmAugment.dim if config.augment > 0 else 0


def build_network(config: TrainConfig, data: Dataset | DataFacts) -> nn.Module:
    """The network of a run, for its data."""
    return build_model(
        config.model,
        data.image_shape,
        data.num_classes,
        augment_dim=augment_dim(config.data),
        condition_shape=data.condition_shape,
    )


def build_state(config: TrainConfig, data: Dataset, device: torch.device, processes: Processes = SINGLE) -> RunState:
    """The state of a run at its first step: a function of the seed; of several processes each draws its own numbers."""
    torch.manual_seed(config.seed)
    model = build_network(config, data)
    begin(model, config, tell=processes.leads)
    model.to(device)
    if config.channels_last:
        in_channels_last(model)
    averages = Averages(model, averages_of(config.ema), config.ema.period, warmup=config.ema.warmup)
    optimizer = build_optimizer(config.optimizer, model)
    if processes.leads and (told := description(optimizer)):
        note(f"optimizer={config.optimizer.name}: {told}")
    state = RunState(
        model,
        averages,
        optimizer,
        torch.Generator(device).manual_seed(config.seed),
        Guard(config.guard, device),
        Position(),
        DataFacts.of(data),
        data.files,
        processes,
        Shards(model, optimizer, processes, averages) if config.distributed == "fsdp" else None,
    )
    if processes.size > 1:
        state.reseed(config.seed)
    return state


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


def limits_of(config: TrainConfig, device: torch.device) -> WatchdogLimits:
    """The configuration's limits, in seconds."""
    watch = config.watch
    return WatchdogLimits(
        first_step=60 * watch.first_step_minutes,
        step=60 * watch.step_minutes,
        evaluation=60 * watch.evaluation_minutes,
        gpu_idle=60 * watch.gpu_idle_minutes if device.type == "cuda" else 0.0,
        checkpoint_factor=watch.checkpoint_factor,
        checkpoint_least=60 * watch.checkpoint_minutes,
        shown=config.guard.stall_seconds,
    )


def watchdog_of(limits: WatchdogLimits, state: RunState, run: Path, use: GpuActivity) -> Watchdog:
    """The watchdog of a run, which reads its position and leaves a line in its ends.jsonl."""

    def tell(verdict: Verdict, step: int) -> None:
        write_end(run, reason=verdict.reason, message=verdict.message, step=step, exit_code=STUCK)

    return Watchdog(limits, lambda: state.position.step, tell, use.busy)


def steps_to_checkpoint(config: TrainConfig, position: Position, steps: int) -> int:
    """Most steps until the next checkpoint, with `steps` of them in an epoch; one that time decides may come sooner."""
    every = save_interval(config.save_every)
    made = position.epoch * steps + position.batch
    left = config.epochs * steps - made
    if every.steps:
        return max(0, min(left, every.steps - position.step % every.steps))
    if every.epochs:
        left = min(left, (position.epoch // every.epochs + 1) * every.epochs * steps - made)
    return max(0, left)
