"""Which values of a configuration can be: one table of names, one of ranges."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from fullstride.device import DEVICES
from fullstride.errors import ConfigError, one_of
from fullstride.meanflow.config import TrainConfig
from fullstride.meanflow.derivative import JVP_BACKENDS
from fullstride.meanflow.objective import SPLITS
from fullstride.meanflow.presets import LOSS_PRESETS, PRESETS
from fullstride.meanflow.times import TIME_LAWS
from fullstride.precision import PRECISIONS

NAMES: dict[str, Iterable[str]] = {
    "precision": PRECISIONS,
    "device": DEVICES,
    "loss.time_law": TIME_LAWS,
    "loss.split": SPLITS,
    "loss.jvp_backend": JVP_BACKENDS,
    "optimizer.decay": ("constant", "cosine"),
    **{f"{group}.name": PRESETS[group] for group in ("data", "model", "loss", "optimizer")},
}


@dataclass(frozen=True)
class Rule:
    """What the values of `keys` must be, in words and as a predicate, which NaN must fail."""

    expected: str
    holds: Callable[[Any], bool]
    keys: tuple[str, ...]


def _is_folder_name(name: str) -> bool:
    return bool(name.strip()) and name != "." and not any(part in name for part in ("/", "\\", "..", "\0"))


RULES = (
    Rule("a share in [0, 1]", lambda x: 0 <= x <= 1, ("loss.meanflow_ratio",)),
    Rule(
        "a number in [0, 1)",
        lambda x: 0 <= x < 1,
        ("model.dropout", "optimizer.beta1", "optimizer.beta2", "ema.decay"),
    ),
    Rule(
        "at least 1",
        lambda x: x >= 1,
        (
            "data.batch_size", "evaluation.batch_size", "model.num_blocks", "ema.period", "epochs",
            "gradient_accumulation_steps", "log_every",
        ),
    ),
    Rule("a finite number, at least 1", lambda x: 1 <= x < math.inf, ("model.time_max_frequency",)),
    Rule(
        "a finite number above 0",
        lambda x: 0 < x < math.inf,
        (
            "loss.logit_normal_std", "loss.r_logit_normal_std", "loss.weighting_eps", "optimizer.lr", "optimizer.eps",
        ),
    ),
    Rule(
        "a finite number, at least 0",
        lambda x: 0 <= x < math.inf,
        (
            "loss.weighting_power", "optimizer.weight_decay", "optimizer.warmup_steps", "optimizer.grad_clip",
            "eval_every", "save_every",
        ),
    ),
    Rule("a finite number", math.isfinite, ("loss.logit_normal_mean", "loss.r_logit_normal_mean")),
    Rule("an even number, at least 2", lambda x: x >= 2 and x % 2 == 0, ("model.channels",)),
    Rule("0 (as many as were held out), or at least 2", lambda x: x == 0 or x >= 2, ("evaluation.num_samples",)),
    Rule("a number from 0 to 2^32 - 1", lambda x: 0 <= x < 2**32, ("seed",)),
    Rule(
        "at least one number, each at least 1",
        lambda xs: len(xs) > 0 and min(xs) >= 1,
        ("model.channel_mult", "evaluation.steps"),
    ),
    Rule("numbers of at least 1", lambda xs: all(x >= 1 for x in xs), ("model.attention_resolutions",)),
    Rule("a folder's name, without / \\ or ..", _is_folder_name, ("run_name",)),
)  # fmt: skip


def validate(config: TrainConfig) -> None:
    """Check every value that is wrong whatever the machine and the data.

    Raises:
        ConfigError: for the first impossible value: its key, what was received, what is expected.

    """
    for key, names in NAMES.items():
        one_of(key, attrgetter(key)(config), names)
    for rule in RULES:
        for key in rule.keys:
            if not rule.holds(value := attrgetter(key)(config)):
                raise ConfigError(f"{key}={value}: expected {rule.expected}")
    if config.resume and config.overwrite:
        raise ConfigError("resume=true overwrite=true: expected one of them; resume goes on, overwrite deletes the run")
    if config.loss.name == "mse":
        _validate_mse(config)


def _validate_mse(config: TrainConfig) -> None:
    # Flow matching has neither: a value given here would be ignored.
    for key, zero in LOSS_PRESETS["mse"].items():
        if (value := getattr(config.loss, key)) != zero:
            raise ConfigError(f"loss.{key}={value}: expected 0 for loss=mse; leave it out or use loss=meanflow")
