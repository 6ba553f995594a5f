"""Splits that share every class out evenly."""

import numpy as np


def every_nth(labels: np.ndarray, n: int, seed: int) -> np.ndarray:
    """Boolean mask of one record in `n` of every class, in random order, the same on every machine.

    The rest is the other split.
    """
    order = np.random.Generator(np.random.PCG64(seed)).permutation(len(labels))
    # Sorted by class, neighbours differ in nothing but their place: deal them out in turn.
    dealt = order[np.argsort(labels[order], kind="stable")]
    held = np.zeros(len(labels), dtype=bool)
    held[dealt[::n]] = True
    return held
