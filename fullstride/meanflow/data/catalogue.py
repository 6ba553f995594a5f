"""The data sets by name, as `data=fashion_mnist`."""

import dataclasses
import inspect
import typing

import torch
from torch import Tensor

from fullstride.errors import ConfigError
from fullstride.meanflow.config.datasets import row_of
from fullstride.meanflow.config.schema import DataConfig
from fullstride.meanflow.data.dataset import Dataset, Split
from fullstride.meanflow.data.resize import fit
from fullstride.meanflow.data.sources.image_folder import source_of
from fullstride.meanflow.data.sources.known_files import KnownFiles
from fullstride.settings.import_path import load_object


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
    if not row_of(config.name).folder or config.holdout == DataConfig.holdout:
        return
    test = source_of(config.place).halves()[1]
    if test is not None:
        raise ConfigError(
            f"data.holdout={config.holdout:g}: expected none with {config.place / test}, whose records are held out; "
            "leave it out, or give a folder without one"
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
    row = row_of(config.name)
    load = load_object(row.load, "data")
    # Another's function is not called unless it says that it returns a data set.
    if not inspect.isfunction(load) or typing.get_type_hints(load).get("return") is not Dataset:
        raise ConfigError(
            f"data={config.name}: expected a function, load(path: Path | None) -> Dataset, that says so, with Dataset "
            "of fullstride.meanflow.data.dataset"
        )
    if row.folder:
        return load(config, known)
    data = load(config.place if config.path else None)
    if config.image_size in (0, data.image_shape[1]):
        return data
    return _resized(data, config.image_size, "pad" if config.fit == "auto" else config.fit)
