"""Which values of a configuration can be: one table of names, one of ranges."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from fullstride.device import DEVICES
from fullstride.errors import ConfigError, one_of
from fullstride.meanflow.config import TrainConfig
from fullstride.meanflow.data.resize import FITS
from fullstride.meanflow.derivative import JVP_BACKENDS
from fullstride.meanflow.metrics.features import FEATURES
from fullstride.meanflow.objective import SPLITS
from fullstride.meanflow.presets import PRESETS
from fullstride.meanflow.times import TIME_LAWS
from fullstride.meanflow.tracking import TRACKERS
from fullstride.precision import PRECISIONS
from fullstride.step.torch import BACKENDS

NAMES: dict[str, Iterable[str]] = {
    "precision": PRECISIONS,
    "device": DEVICES,
    "backend": ("auto", *BACKENDS),
    "loss.time_law": TIME_LAWS,
    "loss.split": SPLITS,
    "loss.jvp_backend": JVP_BACKENDS,
    "optimizer.decay": ("constant", "cosine"),
    "data.fit": ("auto", *FITS),
    "track": TRACKERS,
    **{f"{group}.name": PRESETS[group] for group in ("data", "model", "loss", "optimizer")},
}


AUGMENTED = ("song_unet", "song_unet_tiny")
FOLDERS = ("image_folder", "latents")
MADE = ("digits", "deterministic", "multiclass")


@dataclass(frozen=True)
class Rule:
    """What the values of `keys` must be, in words and as a predicate, which NaN must fail."""

    expected: str
    holds: Callable[[Any], bool]
    keys: tuple[str, ...]


def _is_folder_name(name: str) -> bool:
    return bool(name.strip()) and name != "." and not any(part in name for part in ("/", "\\", "..", "\0"))


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
            "loss.weighting_power", "optimizer.weight_decay", "optimizer.warmup_steps", "optimizer.grad_clip",
            "eval_every", "save_every", "keep", "data.image_size", "data.num_classes", "data.workers",
            "guard.stall_seconds", "guard.max_rollbacks",
        ),
    ),
    Rule("0 (never), or a finite number above 1", lambda x: x == 0 or 1 < x < math.inf, ("guard.spike",)),
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
    Rule("a folder's name, without / \\ or ..", _is_folder_name, ("run_name", "project")),
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
    for received, wrong, expected in _together(config):
        if wrong:
            raise ConfigError(f"{received}: expected {expected}")


def _together(config: TrainConfig) -> Iterator[tuple[str, bool, str]]:
    """What was received, whether it cannot be, and what was expected, for settings that exclude each other."""
    loss, data, model = config.loss, config.data, config.model
    yield (
        "resume=true overwrite=true",
        config.resume and config.overwrite,
        "one of them; resume goes on, overwrite deletes the run",
    )
    # Flow matching has neither: a value given here would be ignored.
    for key in ("meanflow_ratio", "weighting_power"):
        value = getattr(loss, key)
        yield (
            f"loss.{key}={value}",
            loss.name == "mse" and value != 0,
            "0 for loss=mse; leave it out or use loss=meanflow",
        )
    guided = loss.omega != 1 or loss.kappa != 0
    yield (
        "loss.omega, loss.kappa or loss.label_dropout with loss=mse",
        loss.name == "mse" and (guided or loss.label_dropout > 0),
        "none of them: guidance enters MeanFlow's target; use loss=meanflow, with loss.meanflow_ratio=0 if r = t",
    )
    for key, used in (("omega and loss.kappa", guided), ("label_dropout", loss.label_dropout > 0)):
        yield f"loss.{key}", used and not model.class_conditional, "model.class_conditional=true beside guidance"
    yield (
        f"loss.guidance_start={loss.guidance_start} loss.guidance_end={loss.guidance_end}",
        loss.guidance_start > loss.guidance_end,
        "a start that is not above the end",
    )
    yield (
        "loss.omega and loss.kappa without loss.label_dropout",
        guided and loss.label_dropout == 0,
        "loss.label_dropout above 0, such as 0.1: guidance needs the velocity of 'no class', which is trained so",
    )
    yield (
        f"data.augment={data.augment}",
        data.augment > 0 and model.name not in AUGMENTED,
        f"model={' or '.join(AUGMENTED)}, the networks that are told how a picture was augmented",
    )
    yield f"data={data.name}", data.name in FOLDERS and not data.path, f"data.path=FOLDER with data={data.name}"
    yield (
        f"data.path={data.path}",
        data.name in MADE and data.path != "",
        f"no data.path with data={data.name}, which comes with scikit-learn",
    )
    latents = data.name == "latents"
    yield "data.augment with data=latents", latents and data.augment > 0, "pictures; latents are mirrored at most"
    yield (
        "data.image_size with data=latents",
        latents and data.image_size > 0,
        "data.image_size=0: latents stay as stored",
    )
    yield (
        "evaluation.features",
        latents and len(config.evaluation.features) > 0,
        "none with data=latents: they are defined on pictures; the energy distance is always there",
    )
    yield (
        "evaluation.features=[inception]",
        "inception" in config.evaluation.features and not config.evaluation.inception_weights,
        "evaluation.inception_weights=FILE beside it, the weights that torch-fidelity downloads",
    )
