"""Requirements of an evaluation, checked before a run trains for hours towards it."""

from collections.abc import Collection
from pathlib import Path

import torch

from fullstride.assets.fetch import fetch
from fullstride.device.precision import check_precision
from fullstride.errors import ConfigError, one_of
from fullstride.meanflow.config.schema import FEATURES, EvalConfig
from fullstride.meanflow.data.dataset import Dataset
from fullstride.meanflow.metrics.classifier import MIN_SIZE
from fullstride.meanflow.metrics.inception import load_inception
from fullstride.meanflow.metrics.reference import NEIGHBOURS
from fullstride.meanflow.sampling.graphed import check_backend


def can_classify(data: Dataset) -> bool:
    """Return whether a classifier can be trained: pictures of several classes, large enough for its network."""
    return data.pixels and data.num_classes > 1 and min(data.image_shape[1:]) >= MIN_SIZE


def feature_names(data: Dataset, config: EvalConfig) -> list[str]:
    """The configured features; without any, the classifier's where it can be trained."""
    return list(config.features) or (["classifier"] if can_classify(data) else [])


def check_evaluation(data: Dataset, config: EvalConfig, *, due: bool = True) -> None:
    """Check that images can be scored on these data.

    Args:
        data: the data set that images would be compared with.
        config: the run's configuration.
        due: whether the run evaluates at all. Otherwise nothing is fetched and no number of records required, but what
            the configuration names must be there.

    Raises:
        ConfigError: for features that these data cannot have, weights that are missing or others, a package that
            cannot be imported, or fewer than 4 records in a split.

    """
    for name in config.features:
        one_of("evaluation.features", name, FEATURES)
        if not data.pixels:
            raise ConfigError(f"evaluation.features=[{name}]: needs pictures, but data={data.name} holds latents")
        if name == "classifier" and not can_classify(data):
            size = "x".join(map(str, data.image_shape[1:]))
            raise ConfigError(
                f"evaluation.features=[{name}]: needs labelled pictures of several classes, at least "
                f"{MIN_SIZE}x{MIN_SIZE}; data={data.name} has {data.num_classes} classes, {size}"
            )
        if name == "efficientnet_lite0" and due:
            fetch("efficientnet-lite0")
        if name == "inception":
            load_inception(inception_weights(config))
    records = min(len(data.test), len(data.train))
    if due and records <= NEIGHBOURS:
        raise ConfigError(
            f"data={data.name}: {len(data.test)} held-out and {len(data.train)} training records, but an evaluation "
            f"needs at least {NEIGHBOURS + 1} of each; raise data.holdout, or set eval_every=0"
        )


def check_generating(config: EvalConfig, device: torch.device, options: Collection[str] = ()) -> None:
    """Check that the network can generate on a device as the configuration says.

    Args:
        config: the configuration of the evaluation.
        device: the device that generates.
        options: command-line options given instead of keys, which messages then name.

    Raises:
        ConfigError: for a precision or a backend that the device does not have.

    """
    name = lambda key: f"--{key}" if key in options else f"evaluation.{key}"  # noqa: E731
    check_precision(config.precision, device, name("precision"))
    check_backend(config.backend, device, name("backend"))


def inception_weights(config: EvalConfig) -> Path:
    """The file that the configuration names.

    Raises:
        ConfigError: if it names none.

    """
    if not config.inception_weights:
        raise ConfigError(
            "features=inception: no file of weights given; set evaluation.inception_weights=FILE when training, "
            "--inception-weights FILE when evaluating"
        )
    return Path(config.inception_weights).expanduser()
