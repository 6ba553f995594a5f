"""`data=digits`: scikit-learn's handwritten digits (1,797 of 8x8, the test set of UCI's optical recognition data)."""

from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from fullstride.meanflow.data.dataset import Dataset, Split, every_nth, fingerprint

SPLITS = ("train", "test")
SPLIT_SEED = 1797


def digits(split: str) -> tuple[Float[Tensor, "n 1 8 8"], Int[Tensor, " n"]]:
    """Images scaled from 0..16 to [-1, 1] and labels 0..9 of one half, `train` (898) or `test` (899, held out).

    Raises:
        ValueError: for another split.

    """
    if split not in SPLITS:
        raise ValueError(f"split is {split!r}, expected one of {', '.join(SPLITS)}")
    from sklearn.datasets import load_digits  # a long import, which other data do without

    rows, target = map(np.asarray, load_digits(return_X_y=True))
    held = every_nth(target, 2, SPLIT_SEED)
    chosen = held if split == "test" else ~held
    images = torch.tensor(rows[chosen], dtype=torch.float32).reshape(-1, 1, 8, 8)
    return images / 8 - 1, torch.tensor(target[chosen], dtype=torch.long)


def load(path: Path | None = None) -> Dataset:
    """Both halves; there is no file that they could be in."""
    train, test = (Split(*digits(split)) for split in SPLITS)
    content = fingerprint(train.records, train.labels, test.records, test.labels)  # pyright: ignore[reportArgumentType]
    return Dataset("digits", train, test, 10, (1, 8, 8), content)
