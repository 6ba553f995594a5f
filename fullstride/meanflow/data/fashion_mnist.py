"""`data=fashion_mnist`: Zalando's 70,000 pictures of clothes, 28x28 grey, ten classes (arXiv:1708.07747; MIT licence).

Grey and easy: it stands in for nothing coloured. Its files are in the IDX format of MNIST's family.
"""

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from fullstride.assets.fetch import fetch
from fullstride.errors import ConfigError
from fullstride.meanflow.data.dataset import Dataset, Split, fingerprint


def read_packed(file: Path) -> bytes:
    """The content of a file, unpacked if it is packed, whatever its name.

    Raises:
        ConfigError: for a packed file that is damaged.

    """
    data = file.read_bytes()
    try:
        return gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{file}: {error}; damaged, download it again") from None


UBYTE = 8


def read_idx(file: Path, shape: tuple[int, ...]) -> np.ndarray:
    """The array of bytes in a file, packed by gzip or not; it is read-only.

    Args:
        file: two zero bytes, one for the type of the elements, one for the number of axes, the sizes as big-endian
            32-bit numbers, the elements.
        shape: what the file must hold.

    Raises:
        ConfigError: for a file that holds anything else, or not all of it.

    """
    data = read_packed(file)
    header = struct.pack(f">HBB{len(shape)}I", 0, UBYTE, len(shape), *shape)
    if (found := data[:4]) != header[:4]:
        raise ConfigError(f"{file}: magic number 0x{found.hex()}, expected 0x{header[:4].hex()}: not this IDX file")
    if data[: len(header)] != header:
        sizes = struct.unpack_from(f">{min(len(shape), len(data) // 4 - 1)}I", data, 4)
        raise ConfigError(f"{file}: sizes {sizes}, expected {shape}: truncated, or from another data set")
    if (count := len(data) - len(header)) != math.prod(shape):
        raise ConfigError(
            f"{file}: {count} bytes after its header, expected {math.prod(shape)}: damaged, download it again"
        )
    return np.frombuffer(data, np.uint8, offset=len(header)).reshape(shape)


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
        raise ConfigError(f"{labels}: label {classes.max()}, expected 0 to {CLASSES - 1}; damaged, download it again")
    return torch.tensor(pixels)[:, None], torch.tensor(classes, dtype=torch.long)
