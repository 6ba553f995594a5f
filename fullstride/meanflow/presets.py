"""What the command line can set: the choices of each group, as `model=unet_tiny`, and every key with its type."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from fullstride.meanflow.config import TrainConfig

Presets = dict[str, dict[str, Any]]

MODEL_PRESETS: Presets = {
    "unet": {"name": "unet"},
    "unet_tiny": {
        "name": "unet_tiny",
        "channels": 24,
        "channel_mult": [1, 2],
        "num_blocks": 1,
        "attention_resolutions": [],
    },
}
LOSS_PRESETS: Presets = {
    "meanflow": {"name": "meanflow"},
    "mse": {"name": "mse", "meanflow_ratio": 0.0, "weighting_power": 0.0},
}
# The first choice of a group is its default.
PRESETS: dict[str, Presets] = {
    "data": {"digits": {"name": "digits"}},
    "model": MODEL_PRESETS,
    "loss": LOSS_PRESETS,
    "optimizer": {"adamw": {"name": "adamw"}},
    "ema": {"default": {}},
    "evaluation": {"default": {}},
}


def _leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for field in fields(config):
        if is_dataclass(field.type):
            yield from _leaves(field.type, f"{field.name}.")
        # `model.name=unet_tiny` would change the name and not the network.
        elif not (prefix and field.name == "name"):
            yield prefix + field.name, field.type


KEYS: dict[str, Any] = dict(_leaves(TrainConfig))
