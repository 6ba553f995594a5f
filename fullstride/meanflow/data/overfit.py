"""`data=deterministic` and `data=multiclass`: a few fixed pictures, the same for training and testing.

They ask one thing of a loss and a network: can they learn a handful of pictures by heart? So both splits hold the same
records on purpose, and a score on them says nothing about generalisation. The pictures are scikit-learn's digits,
8x8 grey, which need no network; levels 0..16 become bytes as round(255 level / 16).
"""

from pathlib import Path

import numpy as np
import torch

from fullstride.meanflow.data.dataset import Dataset, Split, fingerprint

RECORDS = 1280


def deterministic(path: Path | None = None) -> Dataset:
    """Ten labels with one picture each."""
    return _first("deterministic", classes=10, each=1)


def multiclass(path: Path | None = None) -> Dataset:
    """Four labels with ten pictures each."""
    return _first("multiclass", classes=4, each=10)


def _first(name: str, classes: int, each: int) -> Dataset:
    """The first pictures of each digit in scikit-learn's order, first 0, 1, ..., then the second of each, and so on.

    This sequence is repeated until there are 1,280 records: ten batches of 128 in an epoch, and about the distribution
    of the few pictures for statistics that leave each record's distance to itself out.
    """
    from sklearn.datasets import load_digits  # a long import, which other data do without

    rows, digits = load_digits(return_X_y=True)
    chosen = np.stack([np.flatnonzero(digits == digit)[:each] for digit in range(classes)], axis=1).ravel()
    repeats = RECORDS // len(chosen)
    levels = torch.tensor(rows[chosen]).reshape(-1, 1, 8, 8)
    records = (levels * 255 / 16).round().to(torch.uint8).repeat(repeats, 1, 1, 1)
    labels = torch.tensor(digits[chosen], dtype=torch.long).repeat(repeats)
    split = Split(records, labels)
    return Dataset(name, split, split, classes, (1, 8, 8), fingerprint(records, labels))
