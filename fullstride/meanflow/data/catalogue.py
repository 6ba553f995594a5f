"""The data sets by name, as `data=fashion_mnist`."""

import dataclasses
import os
from pathlib import Path

import torch
from torch import Tensor

from fullstride.errors import ConfigError
from fullstride.meanflow.config.conflicts import FOLDERS
from fullstride.meanflow.config.schema import DataConfig
from fullstride.meanflow.data import cifar10, fashion_mnist, mnist5k, overfit
from fullstride.meanflow.data.dataset import Dataset, Split
from fullstride.meanflow.data.digits import digits
from fullstride.meanflow.data.fingerprint import fingerprint
from fullstride.meanflow.data.latents import latents
from fullstride.meanflow.data.resize import fit
from fullstride.meanflow.data.skipping import Skips
from fullstride.meanflow.data.sources.folders import split_folders
from fullstride.meanflow.data.sources.image_folder import image_folder, source_of
from fullstride.meanflow.data.sources.known_files import KnownFiles

FILES = {"mnist5k": mnist5k.load, "fashion_mnist": fashion_mnist.load, "cifar10": cifar10.load}


def _place(config: DataConfig) -> Path:
    """`data.path`, whose ~ no shell expands behind a key with a dot."""
    return Path(os.path.expanduser(config.path))


def _digits() -> Dataset:
    train, test = (Split(*digits(split)) for split in ("train", "test"))
    content = fingerprint(train.records, train.labels, test.records, test.labels)  # pyright: ignore[reportArgumentType]
    return Dataset("digits", train, test, 10, (1, 8, 8), content)


def _folder(config: DataConfig, known: KnownFiles | None) -> Dataset:
    how = {"auto": "crop", "crop": "crop", "resize": "stretch"}.get(config.fit)
    if how is None:
        raise ConfigError(f"data.fit={config.fit}: expected crop or resize with data=image_folder")
    size = config.image_size or None
    data = image_folder(
        _place(config),
        image_size=size,
        how=how,
        holdout=config.holdout,
        known=known,
        leave_damaged=config.check or config.skip_damaged > 0,
    )
    if not config.skip_damaged:
        return data
    skips = Skips(config.skip_damaged)
    splits = (dataclasses.replace(split, skips=skips) for split in (data.train, data.test))
    return dataclasses.replace(data, **dict(zip(("train", "test"), splits, strict=True)))


def _latents(config: DataConfig) -> Dataset:
    classes = config.num_classes or None
    data = latents(_place(config), scale=config.latent_scale, holdout=config.holdout, num_classes=classes)
    if config.hflip and data.train.flipped is None:
        raise ConfigError(
            f"data.hflip=true: the shards in {config.path} hold no moments_flip, and latents cannot be mirrored "
            "otherwise; encode the mirrored pictures, too, or set data.hflip=false"
        )
    return data


def _resized(data: Dataset, size: int, how: str) -> Dataset:
    """The pictures of a set in memory at another size."""

    def split(old: Split) -> Split:
        if not isinstance(old.records, Tensor) or old.records.dtype != torch.uint8:
            raise ConfigError(f"data.image_size={size}: data={data.name} stays as it is; leave it out")
        return Split(fit(old.records, size, how), old.labels)

    shape = (data.image_shape[0], size, size)
    content = f"{data.fingerprint} {how} {size}"
    return dataclasses.replace(
        data, train=split(data.train), test=split(data.test), image_shape=shape, fingerprint=content
    )


def check_holdout(config: DataConfig) -> None:
    """Check that a share to hold out is given only where one is held out.

    Raises:
        ConfigError: if the folder says itself which records are held out, or is none.

    """
    if config.name not in FOLDERS or config.holdout == DataConfig.holdout:
        return
    path = _place(config)
    test = source_of(path).halves()[1] if config.name == "image_folder" else split_folders(path)[1]
    if test is not None:
        raise ConfigError(
            f"data.holdout={config.holdout:g}: expected none with {path / test}, whose records are held out; leave it "
            "out, or give a folder without one"
        )


def load_data(config: DataConfig, known: KnownFiles | None = None) -> Dataset:
    """The data set of that name, in memory or ready to be read, brought to `data.image_size`.

    `data.fit=auto` pads what is in memory and crops what lies in a folder.

    Args:
        config: of the data.
        known: the files that a run was begun with, for a run that goes on or is evaluated.

    Raises:
        ConfigError: if it cannot be had, or is not what it should be.

    """
    if config.name == "latents":
        return _latents(config)
    if config.num_classes:
        raise ConfigError(
            f"data.num_classes={config.num_classes}: data={config.name} knows its classes; leave it out, it is for "
            "data=latents"
        )
    if config.name == "image_folder":
        return _folder(config, known)
    if config.name in FILES:
        data = FILES[config.name](_place(config) if config.path else None)
    else:
        data = _digits() if config.name == "digits" else overfit.load(config.name)
    if config.image_size in (0, data.image_shape[1]):
        return data
    return _resized(data, config.image_size, "pad" if config.fit == "auto" else config.fit)
