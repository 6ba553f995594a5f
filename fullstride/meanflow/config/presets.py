"""Settings of the command line: the choices of each group, as `model=unet_tiny`, and every key with its type."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from functools import partial
from typing import Any

from fullstride.errors import ConfigError, one_of
from fullstride.meanflow.config import outside, schema
from fullstride.meanflow.config.datasets import DATASETS
from fullstride.meanflow.config.losses import LOSSES
from fullstride.meanflow.config.networks import MODELS
from fullstride.meanflow.config.optimizers import OPTIMIZERS
from fullstride.settings.fields import Key, walk
from fullstride.settings.overrides import flat, is_import_path

Choices = Mapping[str, Callable[..., Any]]

# The first choice of a group is its default.
PRESETS: dict[str, Choices] = {
    "data": {name: partial(schema.DataConfig, name=name) for name in DATASETS},
    "model": MODELS,
    "loss": LOSSES,
    "optimizer": {name: partial(schema.OptimizerConfig, name=name) for name in OPTIMIZERS},
    "ema": {"default": schema.EmaConfig},
    "guard": {"default": schema.GuardConfig},
    "watch": {"default": schema.WatchConfig},
    "evaluation": {"default": schema.EvalConfig},
}
# Groups whose choice may be an import path, `package.module:Name`.
OUTSIDE: Mapping[str, Callable[[str], Any]] = {
    "data": lambda path: schema.DataConfig(name=path),
    "model": lambda path: outside.network_config(path)(),
    "loss": lambda path: outside.loss_config(path)(),
}


def chosen(choices: dict[str, str]) -> schema.TrainConfig:
    """The defaults under chosen presets, e.g. of `{"model": "dit_b2"}`."""
    return schema.TrainConfig(
        **{group: _choice(group, choices.get(group, next(iter(PRESETS[group])))) for group in PRESETS}
    )


def _choice(group: str, name: str) -> Any:
    """A group as its choice begins: a preset, or what an import path adds to it."""
    if is_import_path(name) and group in OUTSIDE:
        return OUTSIDE[group](name)
    one_of(group, name, PRESETS[group])
    return copy.deepcopy(PRESETS[group][name]())  # a preset's lists are one for all calls


def keys_of(config: schema.TrainConfig) -> dict[str, Key]:
    """Every key that a configuration has; those of `model` and `loss` depend on the choice."""
    # `model.name=unet_tiny` would change the name and not the network.
    own = {"preset", *(f"{group}.name" for group in PRESETS)}
    return {key.name: key for key in walk(config) if key.name not in own}


# Every key of any choice.
WITH_KEYS_OF_THEIR_OWN = [{"model": model} for model in MODELS] + [{"loss": loss} for loss in LOSSES]
KEYS: dict[str, Key] = {name: key for made in WITH_KEYS_OF_THEIR_OWN for name, key in keys_of(chosen(made)).items()}


def config_from_dict(values: dict[str, Any]) -> schema.TrainConfig:
    """The configuration whose `dataclasses.asdict` is `values`, as checkpoints store it.

    A key that is missing, as in a checkpoint of an earlier version, has its default.

    Raises:
        ConfigError: for a network or a key that this version does not know.

    """
    model, loss = values["model"]["name"], values.get("loss", {}).get("name", "")
    if not is_import_path(model):
        one_of("model.name", model, MODELS)
    config = chosen({"model": model} | ({"loss": loss} if loss in LOSSES else {}))
    if is_import_path(loss):
        config.loss = outside.saved_loss(values["loss"])
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
