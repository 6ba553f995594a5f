"""Weights in the files of other projects: safetensors, PyTorch's own, diffusers' folders; no code in them is run."""

import argparse
import json
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from fullstride.errors import MOST_SHOWN, ConfigError, one_line, shortened

_DIFFUSERS_CONFIG = "config.json"
_DIFFUSERS_WEIGHTS = ("diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.bin")
# Entries of a training's file that hold weights, the best ones first.
_ENTRIES = ("ema", "model", "state_dict")
_WRAPPERS = ("module.", "_orig_mod.")  # which DistributedDataParallel and torch.compile put before each name


@dataclass(frozen=True)
class WeightFile:
    """Contents of a file.

    Attributes:
        tensors: tensors by name.
        settings: what the file says about the training or the network.

    """

    tensors: dict[str, Tensor]
    settings: Mapping[str, Any] = field(default_factory=dict)


def is_diffusers(folder: Path) -> bool:
    """Tell whether a folder is one that diffusers has saved a model in."""
    return any((folder / name).is_file() for name in _DIFFUSERS_WEIGHTS)


def read_weights(path: Path) -> WeightFile:
    """The weights in a file or in a diffusers model's folder, on the CPU.

    Raises:
        ConfigError: if they cannot be read without running code, or there are no tensors.

    """
    if path.is_dir():
        file = next(path / name for name in _DIFFUSERS_WEIGHTS if (path / name).is_file())
        settings = json.loads((path / _DIFFUSERS_CONFIG).read_text()) if (path / _DIFFUSERS_CONFIG).is_file() else {}
        return WeightFile(read_weights(file).tensors, settings)
    content = _safetensors(path) if path.suffix == ".safetensors" else _pickled(path)
    settings = content.get("args", {}) if isinstance(content, Mapping) else {}
    settings = vars(settings) if isinstance(settings, argparse.Namespace) else settings
    entry = content
    while isinstance(entry, Mapping) and (inner := [k for k in _ENTRIES if isinstance(entry.get(k), Mapping)]):
        entry = entry[inner[0]]
    if not isinstance(entry, Mapping) or not entry or not all(isinstance(x, Tensor) for x in entry.values()):
        raise ConfigError(f"init_from={path}: no weights by name in it; save the network's state_dict() alone")
    for wrapper in _WRAPPERS:
        if all(name.startswith(wrapper) for name in entry):
            entry = {name.removeprefix(wrapper): tensor for name, tensor in entry.items()}
    return WeightFile(dict(entry), settings if isinstance(settings, Mapping) else {})


def _safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise ConfigError(
            f"init_from={path}: not a whole safetensors file ({one_line(error)}); copy it again"
        ) from None


def _pickled(path: Path) -> Any:
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError) as error:
        reason = shortened(one_line(error), MOST_SHOWN)
        raise ConfigError(
            f"init_from={path}: cannot be read as weights alone ({reason}); save the network's state_dict() as "
            "safetensors, or with torch.save"
        ) from None
