"""`data=deterministic` and `data=multiclass`: a few fixed pictures, the same for training and testing.

They ask one thing of a loss and a network: can they learn a handful of pictures by heart? So both splits hold the same
records on purpose, and a score on them says nothing about generalisation. The pictures are scikit-learn's digits,
8x8 grey, which need no network; levels 0..16 become bytes as round(255 level / 16).
"""

import numpy as np
import torch

from fullstride.errors import one_of
from fullstride.meanflow.data.dataset import Dataset, Split
from fullstride.meanflow.data.fingerprint import fingerprint

# Classes, and pictures of each: one picture a label, or four labels with ten each.
SETS = {"deterministic": (10, 1), "multiclass": (4, 10)}
RECORDS = 1280


def load(name: str) -> Dataset:
    """One of the sets: `deterministic`, where each of ten labels has one picture, or `multiclass`, 4 x 10 pictures.

    The pictures are the first ones of each digit in scikit-learn's order, first 0, 1, ..., then the second of each, and
    so on. This sequence is repeated until there are 1,280 records: ten batches of 128 in an epoch, and about the
    distribution of the few pictures for statistics that leave each record's distance to itself out.

    Raises:
        ConfigError: for another name.

    """
    one_of("data", name, SETS)
    classes, each = SETS[name]
    from sklearn.datasets import load_digits  # a long import, which other data do without

    rows, digits = load_digits(return_X_y=True)
    chosen = np.stack([np.flatnonzero(digits == digit)[:each] for digit in range(classes)], axis=1).ravel()
    repeats = RECORDS // len(chosen)
    levels = torch.tensor(rows[chosen]).reshape(-1, 1, 8, 8)
    records = (levels * 255 / 16).round().to(torch.uint8).repeat(repeats, 1, 1, 1)
    labels = torch.tensor(digits[chosen], dtype=torch.long).repeat(repeats)
    split = Split(records, labels)
    return Dataset(name, split, split, classes, (1, 8, 8), fingerprint(records, labels))
