"""`data=fashion_mnist`: Zalando's 70,000 pictures of clothes, 28x28 grey, ten classes (arXiv:1708.07747; MIT licence).

Grey and easy: it stands in for nothing coloured.
"""

from pathlib import Path

import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from fullstride.assets.fetch import fetch
from fullstride.errors import ConfigError
from fullstride.meanflow.data.dataset import Dataset, Split, fingerprint
from fullstride.meanflow.data.sources.idx import read_idx

SIDE, CLASSES = 28, 10
SIZES = {"train": 60_000, "test": 10_000}


def load(path: Path | None = None) -> Dataset:
    """The published split: 60,000 training and 10,000 held-out pictures, (1, 28, 28) bytes.

    Args:
        path: the folder of the four files under their published names, packed or not; without one they are taken
            from Debian's package `dataset-fashion-mnist` or fetched.

    Raises:
        ConfigError: if a file cannot be had, or is another one.

    """
    train, test = (
        read_split(fetch(f"fashion-mnist/{name}-images", path), fetch(f"fashion-mnist/{name}-labels", path), size)
        for name, size in SIZES.items()
    )
    content = fingerprint(*train, *test)
    return Dataset("fashion_mnist", Split(*train), Split(*test), CLASSES, (1, SIDE, SIDE), content)


def read_split(images: Path, labels: Path, size: int) -> tuple[UInt8[Tensor, "n 1 28 28"], Int[Tensor, " n"]]:
    """The `size` pictures and labels of two IDX files.

    Raises:
        ConfigError: for files of another format or size, or a label that is no class.

    """
    pixels, classes = read_idx(images, (size, SIDE, SIDE)), read_idx(labels, (size,))
    if classes.max() >= CLASSES:
        raise ConfigError(f"{labels}: label {classes.max()}, expected 0 to {CLASSES - 1}; damaged, get it again")
    return torch.tensor(pixels)[:, None], torch.tensor(classes, dtype=torch.long)
