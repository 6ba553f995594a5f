"""Everything that a run needs to go on exactly: weights, average, optimizer, random number generators, position."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fullstride.errors import ConfigError
from fullstride.meanflow.checkpoint import Tensors, read_group, read_manifest, write_checkpoint
from fullstride.meanflow.config import TrainConfig
from fullstride.meanflow.ema import Ema

# What may differ between a run and its continuation: how long, how often, where to; never what is learned.
FREE_KEYS = {
    "epochs",
    "eval_every",
    "save_every",
    "log_every",
    "resume",
    "overwrite",
    "output_dir",
    "run_name",
    "evaluation",
}


@dataclass
class Position:
    """Where in the run: `step` optimizer steps made in all, `batch` of them in epoch `epoch`."""

    step: int = 0
    epoch: int = 0
    batch: int = 0


@dataclass
class RunState:
    """The live objects of a run; `save` and `restore` are each other's inverse."""

    model: nn.Module
    ema: Ema
    optimizer: torch.optim.Optimizer
    generator: torch.Generator
    position: Position
    image_shape: tuple[int, int, int]
    num_classes: int

    def save(self, folder: Path, config: TrainConfig) -> Path:
        """Write a checkpoint of the present moment and return its folder."""
        groups = {
            "model": dict(self.model.state_dict()),
            "ema": dict(self.ema.model.state_dict()),
            "optimizer": _optimizer_tensors(self.optimizer),
            "rng": _rng_tensors(self.generator),
        }
        manifest = {
            "position": asdict(self.position),
            "ema_updates": self.ema.updates,
            "image_shape": list(self.image_shape),
            "num_classes": self.num_classes,
            "config": asdict(config),
        }
        return write_checkpoint(folder, self.position.step, groups, manifest)

    def restore(self, checkpoint: Path, config: TrainConfig) -> None:
        """Return to the moment of a checkpoint.

        Raises:
            ConfigError: if the checkpoint is damaged or belongs to another configuration.

        """
        manifest = read_manifest(checkpoint)
        refuse_other_config(checkpoint, manifest["config"], asdict(config))
        self.model.load_state_dict(read_group(checkpoint, "model"))
        self.ema.model.load_state_dict(read_group(checkpoint, "ema"))
        self.ema.updates = manifest["ema_updates"]
        _load_optimizer(self.optimizer, read_group(checkpoint, "optimizer"))
        _load_rng(self.generator, read_group(checkpoint, "rng"))
        self.position = Position(**manifest["position"])


def _flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in config.items():
        flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def refuse_other_config(checkpoint: Path, saved: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Refuse to go on with another configuration than the checkpoint's.

    Raises:
        ConfigError: naming every key that differs and matters.

    """
    old, new = _flatten(saved), _flatten(wanted)
    differing = [k for k in sorted(old | new) if old.get(k) != new.get(k) and k.split(".")[0] not in FREE_KEYS]
    if differing:
        changes = ", ".join(f"{k}: {old.get(k)} -> {new.get(k)}" for k in differing)
        raise ConfigError(f"{checkpoint}: cannot resume with other settings ({changes}); use another run_name")


def _optimizer_tensors(optimizer: torch.optim.Optimizer) -> Tensors:
    state = optimizer.state_dict()["state"]
    return {f"{index}.{key}": value for index, entry in state.items() for key, value in entry.items()}


def _load_optimizer(optimizer: torch.optim.Optimizer, tensors: Tensors) -> None:
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        index, key = name.split(".", 1)
        state.setdefault(int(index), {})[key] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _rng_tensors(generator: torch.Generator) -> Tensors:
    tensors = {"generator": generator.get_state(), "cpu": torch.get_rng_state()}
    if generator.device.type == "cuda":
        tensors["cuda"] = torch.cuda.get_rng_state(generator.device)
    return tensors


def _load_rng(generator: torch.Generator, tensors: Tensors) -> None:
    generator.set_state(tensors["generator"])
    torch.set_rng_state(tensors["cpu"])
    if generator.device.type == "cuda":
        torch.cuda.set_rng_state(tensors["cuda"], generator.device)
