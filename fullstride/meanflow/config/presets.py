"""What the command line can set: the choices of each group, as `model=unet_tiny`, and every key with its type."""

import copy
from collections.abc import Callable
from dataclasses import is_dataclass
from functools import partial
from typing import Any

from fullstride.errors import ConfigError, one_of
from fullstride.meanflow.config.schema import (
    DataConfig,
    DiTConfig,
    EmaConfig,
    EvalConfig,
    GuardConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    SongUNetConfig,
    TrainConfig,
    UNetConfig,
    WatchConfig,
)
from fullstride.settings.fields import Key, walk
from fullstride.settings.overrides import flat

Choices = dict[str, Callable[..., Any]]

DATASETS = (
    "digits", "mnist5k", "fashion_mnist", "cifar10", "image_folder", "latents", "deterministic", "multiclass",
)  # fmt: skip


def _dit(name: str, patch_size: int, width: int, depth: int, heads: int) -> Callable[..., ModelConfig]:
    return partial(DiTConfig, name=name, patch_size=patch_size, width=width, depth=depth, heads=heads)


# Sizes of the DiT family: arXiv:2212.09748, table 1; M: arXiv:2505.13447, appendix A.
MODELS: Choices = {
    "unet": UNetConfig,
    "unet_tiny": partial(
        UNetConfig, name="unet_tiny", channels=24, channel_mult=[1, 2], num_blocks=1, attention_resolutions=[]
    ),
    "unet_medium": partial(
        UNetConfig, name="unet_medium", channels=96, channel_mult=[1, 2, 2], num_blocks=2, attention_resolutions=[16]
    ),
    "song_unet": SongUNetConfig,
    "song_unet_tiny": partial(
        SongUNetConfig, name="song_unet_tiny", channels=24, channel_mult=[1, 2], num_blocks=1, attention_resolutions=[]
    ),
    "dit_b4": _dit("dit_b4", 4, 768, 12, 12),
    "dit_b2": _dit("dit_b2", 2, 768, 12, 12),
    "dit_m2": _dit("dit_m2", 2, 1024, 16, 16),
    "dit_l2": _dit("dit_l2", 2, 1024, 24, 16),
    "dit_xl2": _dit("dit_xl2", 2, 1152, 28, 16),
    "dit_tiny": _dit("dit_tiny", 2, 96, 4, 3),
}
LOSSES: Choices = {
    "meanflow": LossConfig,
    "imf": partial(LossConfig, name="imf"),
    "imf_ema": partial(LossConfig, name="imf_ema"),
    "mse": partial(LossConfig, name="mse", meanflow_ratio=0.0, weighting_power=0.0),
}
# The first choice of a group is its default.
PRESETS: dict[str, Choices] = {
    "data": {name: partial(DataConfig, name=name) for name in DATASETS},
    "model": MODELS,
    "loss": LOSSES,
    "optimizer": {"adamw": OptimizerConfig},
    "ema": {"default": EmaConfig},
    "guard": {"default": GuardConfig},
    "watch": {"default": WatchConfig},
    "evaluation": {"default": EvalConfig},
}


def chosen(choices: dict[str, str]) -> TrainConfig:
    """The defaults under chosen presets, e.g. of `{"model": "dit_b2"}`."""
    made = {group: make[choices.get(group, next(iter(make)))]() for group, make in PRESETS.items()}
    return copy.deepcopy(TrainConfig(**made))  # a preset's lists are one for all calls


def keys_of(config: TrainConfig) -> dict[str, Key]:
    """Every key that a configuration has; those of `model` depend on the family."""
    # `model.name=unet_tiny` would change the name and not the network.
    own = {"preset", *(f"{group}.name" for group in PRESETS)}
    return {key.name: key for key in walk(config) if key.name not in own}


# Every key of any choice.
KEYS: dict[str, Key] = {name: key for model in MODELS for name, key in keys_of(chosen({"model": model})).items()}


def config_from_dict(values: dict[str, Any]) -> TrainConfig:
    """The configuration whose `dataclasses.asdict` is `values`, as checkpoints store it.

    A key that is missing, as in a checkpoint of an earlier version, has its default.

    Raises:
        ConfigError: for a network or a key that this version does not know.

    """
    one_of("model.name", values["model"]["name"], MODELS)
    config = chosen({"model": values["model"]["name"]})
    known = {key.name for key in walk(config)}
    if unknown := [key for key, _ in flat(values) if key not in known]:
        raise ConfigError(
            f"a saved configuration has {', '.join(unknown)}, which this version does not know; use the version of "
            "fullstride that wrote it, or a newer one"
        )
    for key, value in values.items():
        group = getattr(config, key)
        setattr(config, key, type(group)(**value) if is_dataclass(group) else value)
    return config
