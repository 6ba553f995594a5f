"""What of a training the official code has: settings that it does not have, or is not handed, are no comparison."""

from dataclasses import asdict
from pathlib import Path

from fullstride.errors import ConfigError
from fullstride.meanflow.config.networks import SongUNetConfig
from fullstride.meanflow.config.schema import TrainConfig
from fullstride.settings.overrides import flat

NOT_THEIRS = {"data.hflip", "data.augment", "model.class_conditional", "ema.period", "ema.warmup"}
NOT_THEIRS |= {f"loss.{key}" for key in ("name", "weighting", "use_batch_time", "omega", "kappa", "label_dropout")}
NOT_THEIRS |= {f"optimizer.{key}" for key in ("name", "eps", "weight_decay", "grad_clip")}
NOT_THEIRS |= {"gradient_accumulation_steps"}
# Wraps each of its steps; it saves and restores CUDA's random state alone.
RANDOM = Path("meanflow/models/rng.py")


def check_device(checkout: Path, kind: str) -> None:
    """Raise unless a checkout of the official code makes its steps on a kind of device, cuda, cpu or mps.

    Raises:
        ConfigError: if it does not.

    """
    if kind != "cuda" and (checkout.expanduser() / RANDOM).is_file():
        raise ConfigError(
            f"--official {checkout}: its {RANDOM} keeps the random state of a CUDA device and fails on {kind}; run "
            "this on a machine with a GPU"
        )


def check_network(config: TrainConfig) -> None:
    """Raise unless the official code has the network.

    Raises:
        ConfigError: for another one than its.

    """
    if not isinstance(config.model, SongUNetConfig):
        raise ConfigError(f"model={config.model.name}: the official code has song_unet alone; leave it out")


def check_settings(config: TrainConfig, usual: TrainConfig) -> None:
    """Raise for a setting of what is trained that is not the usual one and that the official code does not have.

    Raises:
        ConfigError: naming them.

    """
    given, before = dict(flat(asdict(config))), dict(flat(asdict(usual)))
    if other := [key for key, value in given.items() if key in NOT_THEIRS and value != before.get(key)]:
        raise ConfigError(f"{', '.join(other)}: the official code has no such setting; leave it out")
