"""Which values of a configuration can be: one table of names, one of ranges."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from fullstride.device.precision import PRECISIONS
from fullstride.device.select import DEVICES
from fullstride.errors import ConfigError, one_of
from fullstride.meanflow.config.conflicts import together
from fullstride.meanflow.config.presets import PRESETS
from fullstride.meanflow.config.schema import TrainConfig
from fullstride.meanflow.data.resize import FITS
from fullstride.meanflow.metrics.features import FEATURES
from fullstride.meanflow.objective.derivative import JVP_BACKENDS
from fullstride.meanflow.objective.loss import SPLITS
from fullstride.meanflow.objective.times import TIME_LAWS
from fullstride.meanflow.objective.weighting import WEIGHTINGS
from fullstride.meanflow.sampling.graphed import BACKENDS as SAMPLED_BY
from fullstride.meanflow.training.trackers import TRACKERS
from fullstride.runs.atomic_files import is_folder_name
from fullstride.step.torch import BACKENDS
from fullstride.step.torch.distributed.join import TRANSFERS

NAMES: dict[str, Iterable[str]] = {
    "precision": PRECISIONS,
    "evaluation.precision": PRECISIONS,
    "evaluation.backend": SAMPLED_BY,
    "device": DEVICES,
    "distributed": ("none", "ddp", "fsdp"),
    "transfers": TRANSFERS,
    "backend": ("auto", *BACKENDS),
    "loss.time_law": TIME_LAWS,
    "loss.split": SPLITS,
    "loss.weighting": WEIGHTINGS,
    "loss.jvp_backend": JVP_BACKENDS,
    "loss.jvp_precision": ("same", *PRECISIONS),
    "optimizer.decay": ("constant", "cosine"),
    "data.fit": ("auto", *FITS),
    "track": TRACKERS,
    **{f"{group}.name": PRESETS[group] for group in ("data", "model", "loss", "optimizer")},
}


@dataclass(frozen=True)
class Rule:
    """What the values of `keys` must be, in words and as a predicate, which NaN must fail."""

    expected: str
    holds: Callable[[Any], bool]
    keys: tuple[str, ...]


RULES = (
    Rule(
        "a share in [0, 1]",
        lambda x: 0 <= x <= 1,
        ("loss.meanflow_ratio", "loss.guidance_start", "loss.guidance_end", "loss.label_dropout", "data.augment"),
    ),
    Rule("a share above 0 and below 1", lambda x: 0 < x < 1, ("data.holdout",)),
    Rule(
        "a number in [0, 1)",
        lambda x: 0 <= x < 1,
        ("model.dropout", "optimizer.beta1", "optimizer.beta2"),
    ),
    Rule(
        "at least 1",
        lambda x: x >= 1,
        (
            "data.batch_size", "evaluation.batch_size", "model.num_blocks", "model.depth", "model.width", "model.heads",
            "model.patch_size", "ema.period", "epochs", "gradient_accumulation_steps", "log_every", "guard.max_skips",
        ),
    ),
    Rule("a finite number, at least 1", lambda x: 1 <= x < math.inf, ("model.time_max_frequency",)),
    Rule(
        "a finite number above 0",
        lambda x: 0 < x < math.inf,
        (
            "loss.logit_normal_std", "loss.r_logit_normal_std", "loss.weighting_eps", "optimizer.lr", "optimizer.eps",
            "data.latent_scale",
        ),
    ),
    Rule(
        "a finite number, at least 0",
        lambda x: 0 <= x < math.inf,
        (
            "loss.weighting_power", "loss.jvp_chunk", "optimizer.weight_decay", "optimizer.warmup_steps",
            "optimizer.grad_clip", "eval_every", "save_every", "keep", "data.image_size", "data.num_classes",
            "data.skip_damaged",
            "data.workers", "guard.stall_seconds", "guard.max_rollbacks", "watch.first_step_minutes",
            "watch.step_minutes", "watch.gpu_idle_minutes", "watch.checkpoint_minutes", "watch.evaluation_minutes",
        ),
    ),
    Rule(
        "0 (never), or a finite number above 1",
        lambda x: x == 0 or 1 < x < math.inf,
        ("guard.spike", "watch.checkpoint_factor"),
    ),
    Rule(
        "a finite number",
        math.isfinite,
        ("loss.logit_normal_mean", "loss.r_logit_normal_mean", "loss.omega"),
    ),
    Rule("a number in [0, 1)", lambda x: 0 <= x < 1, ("loss.kappa",)),
    Rule(
        "at least one number in [0, 1), none twice",
        lambda xs: len(xs) > 0 and all(0 <= x < 1 for x in xs) and len(set(xs)) == len(xs),
        ("ema.decays",),
    ),
    Rule(
        f"names out of {', '.join(FEATURES)}, none twice",
        lambda xs: set(xs) <= set(FEATURES) and len(set(xs)) == len(xs),
        ("evaluation.features",),
    ),
    Rule("an even number, at least 2", lambda x: x >= 2 and x % 2 == 0, ("model.channels",)),
    Rule("0 (as many as were held out), or at least 4", lambda x: x == 0 or x >= 4, ("evaluation.num_samples",)),
    Rule("a number from 0 to 2^32 - 1", lambda x: 0 <= x < 2**32, ("seed",)),
    Rule(
        "at least one number, each at least 1",
        lambda xs: len(xs) > 0 and min(xs) >= 1,
        ("model.channel_mult", "evaluation.steps"),
    ),
    Rule("numbers of at least 1", lambda xs: all(x >= 1 for x in xs), ("model.attention_resolutions",)),
    Rule("a folder's name, without / \\ or ..", is_folder_name, ("run_name", "project")),
    Rule("a folder's path; . for this one", lambda x: bool(x.strip()), ("output_dir",)),
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
            group, _, leaf = key.rpartition(".")
            owner = attrgetter(group)(config) if group else config
            # A key of another family of networks is not there.
            if hasattr(owner, leaf) and not rule.holds(value := getattr(owner, leaf)):
                raise ConfigError(f"{key}={value}: expected {rule.expected}")
    for received, wrong, expected in together(config):
        if wrong:
            raise ConfigError(f"{received}: expected {expected}")
