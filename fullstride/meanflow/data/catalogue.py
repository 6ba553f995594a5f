"""The data sets by name, as `data=fashion_mnist`, and pictures in memory brought to another size."""

import dataclasses
import inspect
import typing

import torch
import torch.nn.functional as F
from jaxtyping import UInt8
from torch import Tensor

from fullstride.errors import ConfigError, one_of
from fullstride.meanflow.config.datasets import row_of
from fullstride.meanflow.config.schema import DataConfig
from fullstride.meanflow.data.dataset import Dataset, Split
from fullstride.meanflow.data.sources.image_folder import source_of
from fullstride.meanflow.data.sources.known_files import KnownFiles
from fullstride.settings.overrides import load_object

FITS = ("pad", "resize", "crop")
# Pictures at a time: each needs four bytes a value and copies while it is resized.
BLOCK = 1024


def fit(images: UInt8[Tensor, "n c h w"], size: int, how: str) -> UInt8[Tensor, "n c size size"]:
    """Square pictures of `size` pixels a side.

    Args:
        images: any height and width.
        size: height and width of the result, in pixels.
        how: `pad` surrounds the picture by zeros, one more row or column below or right where the rest is odd; `resize`
            stretches height and width to `size`; `crop` does so with the square in the middle of the picture. Both
            with the bicubic filter, widened where the picture shrinks, as PIL's.

    Raises:
        ConfigError: for a size below 1, one that does not hold the picture (`pad`), or an unknown `how`.

    """
    one_of("data.fit", how, FITS)
    if size < 1:
        raise ConfigError(f"data.image_size={size}: expected a number of pixels")
    height, width = images.shape[-2:]
    if how == "pad":
        check_padded(height, width, size)
        top, left = (size - height) // 2, (size - width) // 2
        return F.pad(images, (left, size - width - left, top, size - height - top))
    if how == "crop":
        side = min(height, width)
        top, left = (height - side) // 2, (width - side) // 2
        images = images[..., top : top + side, left : left + side]
    if images.shape[-2:] == (size, size):
        return images.contiguous()
    blocks = (block.float() for block in images.split(BLOCK))
    resized = (F.interpolate(block, (size, size), mode="bicubic", antialias=True) for block in blocks)
    return torch.cat([block.round().clamp(0, 255).to(torch.uint8) for block in resized])


def check_padded(height: int, width: int, size: int) -> None:
    """Raise unless pictures can be padded to a size.

    Raises:
        ConfigError: for a smaller one.

    """
    if size < max(height, width):
        raise ConfigError(
            f"data.image_size={size}: the pictures are {height}x{width}, which data.fit=pad cannot shrink; "
            "set data.fit=crop or resize"
        )


def _resized(data: Dataset, size: int, how: str) -> Dataset:
    """The pictures of a set in memory at another size."""

    def split(old: Split) -> Split:
        if not isinstance(old.records, Tensor) or old.records.dtype != torch.uint8:
            raise ConfigError(f"data.image_size={size}: data={data.name} cannot be resized; leave it out")
        return Split(fit(old.records, size, how), old.labels)

    shape = (data.image_shape[0], size, size)
    content = f"{data.fingerprint} {how} {size}"
    return dataclasses.replace(
        data, train=split(data.train), test=split(data.test), image_shape=shape, fingerprint=content
    )


def check_holdout(config: DataConfig) -> None:
    """Check that a share to hold out is given only where one is held out.

    Raises:
        ConfigError: if the folder has its own held-out half, or the data set is not a folder.

    """
    row = row_of(config.name)
    if not row.folder or not (row.pixels or row.latents) or config.holdout == DataConfig.holdout:
        return  # tensors check it themselves
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
        config: the configuration of the data.
        known: the files that a run began with, for a run that is resumed or evaluated.

    Raises:
        ConfigError: if the data cannot be found or fetched, or is not the expected data.

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
