"""The official PyTorch code of MeanFlow (github.com/Gsunshine/py-meanflow), from a checkout of the user's.

It is not part of this project. Its own step, compiled by its own training loop, trains its own network with its own
optimizer and averages; it receives the settings and batches that are already on the device, which spares
it its loader.
"""

import argparse
import importlib
import math
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from fullstride.errors import ConfigError
from fullstride.meanflow.config.networks import SongUNetConfig
from fullstride.meanflow.config.schema import TrainConfig
from fullstride.meanflow.data.dataset import Dataset
from fullstride.meanflow.training.build import augment_dim, build_model
from fullstride.settings.overrides import flat

MODULES = ("models.model_configs", "train_arg_parser", "training.train_loop")
NOT_THEIRS = {"data.hflip", "data.augment", "model.class_conditional", "ema.period", "ema.warmup"}
NOT_THEIRS |= {f"loss.{key}" for key in ("name", "weighting", "use_batch_time", "omega", "kappa", "label_dropout")}
NOT_THEIRS |= {f"optimizer.{key}" for key in ("name", "eps", "weight_decay", "grad_clip")}
NOT_THEIRS |= {"gradient_accumulation_steps"}
# Wraps each of its steps; it saves and restores CUDA's random state alone.
RANDOM = Path("meanflow/models/rng.py")


def load_official(checkout: Path) -> dict[str, ModuleType]:
    """The modules of a checkout; ConfigError if it is none, something that it needs is not installed, or other modules
    have its names.
    """
    source = checkout.expanduser().resolve() / "meanflow"
    if not (source / "training" / "train_loop.py").is_file():
        raise ConfigError(
            f"--official {checkout}: found no meanflow/training/train_loop.py; expected a checkout of "
            "github.com/Gsunshine/py-meanflow"
        )
    sys.path.insert(0, str(source))
    try:
        found = {name: importlib.import_module(name) for name in MODULES}
    except ModuleNotFoundError as error:
        raise ConfigError(f"--official {checkout}: it needs {error.name}; run: pip install {error.name}") from None
    finally:
        sys.path.remove(str(source))
    for name, module in found.items():
        if not Path(str(module.__file__)).resolve().is_relative_to(source):
            raise ConfigError(
                f"--official {checkout}: the module {name} is already loaded from {module.__file__}; "
                "run this in a new process"
            )
    return found


def arguments(parser: argparse.ArgumentParser, config: TrainConfig) -> argparse.Namespace:
    """Return the official code's settings from its own parser."""
    loss, optimizer = config.loss, config.optimizer
    given = {
        "batch_size": config.data.batch_size,
        "lr": optimizer.lr,
        "dropout": config.model.dropout if isinstance(config.model, SongUNetConfig) else 0.0,
        "ema_decay": config.ema.decays[0],
        "seed": config.seed,
        "ratio": loss.meanflow_ratio,
        "tr_sampler": loss.time_law,
        "P_mean_t": loss.logit_normal_mean,
        "P_std_t": loss.logit_normal_std,
        "P_mean_r": loss.r_logit_normal_mean,
        "P_std_r": loss.r_logit_normal_std,
        "norm_p": loss.weighting_power,
        "norm_eps": loss.weighting_eps,
        "log_per_step": config.log_every,
        "device": config.device,
    }
    args = parser.parse_args([text for key, value in given.items() for text in (f"--{key}", str(value))])
    args.optimizer_betas = [optimizer.beta1, optimizer.beta2]
    args.ema_decays = list(config.ema.decays[1:])
    args.distributed = False
    args.compile = config.backend.startswith("compile")
    args.use_edm_aug = config.data.augment > 0
    return args


@dataclass
class Training:
    """Objects of a training, as the official main function creates them."""

    model: Any
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    path: Path
    made: int = 0

    def save(self) -> None:
        """Write everything atomically."""
        values = {"model": self.model, "optimizer": self.optimizer, "lr_schedule": self.schedule}
        part = self.path.with_suffix(".part")
        torch.save({"steps": self.made} | {key: value.state_dict() for key, value in values.items()}, part)
        part.replace(self.path)

    def restore(self) -> None:
        """Restore what was written, if anything was."""
        if not self.path.is_file():
            return
        saved = torch.load(self.path, map_location="cpu", weights_only=True)
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.schedule.load_state_dict(saved["lr_schedule"])
        self.made = saved["steps"]


def _schedule(
    optimizer: torch.optim.Optimizer, config: TrainConfig, share: Callable[[], float]
) -> torch.optim.lr_scheduler.LRScheduler:
    """Return the official schedule: warm-up and a constant rate, or half a cosine over the time if it decays."""
    schedulers, warm = torch.optim.lr_scheduler, max(1, config.optimizer.warmup_steps)
    first = schedulers.LinearLR(optimizer, start_factor=1e-8 / config.optimizer.lr, end_factor=1.0, total_iters=warm)
    if config.optimizer.decay == "cosine":
        then = schedulers.LambdaLR(optimizer, lambda _: 0.5 + 0.5 * math.cos(math.pi * share()))
    else:
        then = schedulers.ConstantLR(optimizer, factor=1.0, total_iters=1)
    return schedulers.SequentialLR(optimizer, [first, then], milestones=[warm])


def opened(config: TrainConfig, checkout: Path) -> tuple[dict[str, ModuleType], argparse.Namespace]:
    """Its modules and its settings; PyTorch is set up as its main module does; ConfigError if the checkout cannot be
    used.
    """
    code = load_official(checkout)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    return code, arguments(code["train_arg_parser"].get_args_parser(), config)


def build(
    code: dict[str, ModuleType], config: TrainConfig, data: Dataset, args: Any, share: Callable[[], float], path: Path
) -> Training:
    """Its network, optimizer and schedule, as its main function makes them, for our sizes.

    `share` is that of the time that is over, 0 to 1, for a decaying rate. ConfigError if its network has another
    number of weights than ours.
    """
    model, device = config.model, torch.device(config.device)
    assert isinstance(model, SongUNetConfig)
    channels, size, _ = data.image_shape
    configs = code["models.model_configs"]
    configs.MODEL_CONFIGS["unet"] |= {
        "img_resolution": size,
        "in_channels": channels,
        "out_channels": channels,
        "model_channels": model.channels,
        "channel_mult": model.channel_mult,
        "num_blocks": model.num_blocks,
        "attn_resolutions": model.attention_resolutions,
    }
    torch.manual_seed(config.seed)
    theirs = configs.instantiate_model(args).to(device)
    ours = build_model(model, data.image_shape, 0, augment_dim=augment_dim(config.data))
    counts = [sum(p.numel() for p in net.parameters()) for net in (theirs.net, ours)]
    if counts[0] != counts[1]:
        raise ConfigError(f"--official: its network has {counts[0]:,} weights, expected {counts[1]:,} as in fullstride")
    optimizer = torch.optim.Adam(theirs.net.parameters(), lr=args.lr, betas=tuple(args.optimizer_betas))
    return Training(theirs, optimizer, _schedule(optimizer, config, share), path)


def run_epoch(code: dict[str, ModuleType], training: Training, step: Callable, batches: Any, args: Any) -> None:
    """Train by the official loop, which makes a step of each batch of (images in [0, 1], index).

    It numbers steps by the batches' `__len__`. ValueError from its loop, if a loss is not finite.
    """
    loop, device = code["training.train_loop"], next(training.model.parameters()).device
    loop.train_one_epoch(
        model=training.model,
        compiled_train_step=step,
        data_loader=batches,
        optimizer=training.optimizer,
        lr_schedule=training.schedule,
        device=device,
        epoch=args.start_epoch,
        log_writer=None,
        args=args,
        meters={name: loop.MeanMetric().to(device) for name in ("batch_loss", "batch_time")},
    )


def check_device(checkout: Path, kind: str) -> None:
    """Raise unless a checkout of the official code makes its steps on a kind of device, cuda, cpu or mps; ConfigError
    if it does not.
    """
    if kind != "cuda" and (checkout.expanduser() / RANDOM).is_file():
        raise ConfigError(
            f"--official {checkout}: its {RANDOM} keeps the random state of a CUDA device and fails on {kind}; run "
            "this on a machine with a GPU"
        )


def check_network(config: TrainConfig) -> None:
    """Raise unless the official code has the network; ConfigError for another one than its."""
    if not isinstance(config.model, SongUNetConfig):
        raise ConfigError(f"model={config.model.name}: the official code has only song_unet; omit this setting")


def check_settings(config: TrainConfig, usual: TrainConfig) -> None:
    """Raise for a setting of what is trained that is not the usual one and that the official code does not have;
    ConfigError naming them.
    """
    given, before = dict(flat(asdict(config))), dict(flat(asdict(usual)))
    if other := [key for key, value in given.items() if key in NOT_THEIRS and value != before.get(key)]:
        raise ConfigError(f"{', '.join(other)}: the official code has no such setting; omit it")
