import numpy as np
import pytest

from fullstride.meanflow.data.dataset import every_nth


@pytest.mark.parametrize("n", [2, 3, 5])
def test_every_class_gives_one_in_n(n, seed):
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(7), 11 * n))
    held = every_nth(labels, n, seed)
    assert np.bincount(labels[held]).tolist() == [11] * 7
    assert np.bincount(labels[~held]).tolist() == [11 * (n - 1)] * 7


def test_uneven_classes_differ_by_less_than_one_from_their_share(seed):
    labels = np.random.default_rng(seed).integers(0, 9, 1000)
    held = every_nth(labels, 5, seed)
    assert held.sum() == 200
    assert np.abs(np.bincount(labels[held]) - np.bincount(labels) / 5).max() < 1


def test_the_seed_alone_decides():
    labels = np.arange(1000) % 10
    np.random.seed(1)
    one = every_nth(labels, 5, 7)
    np.random.seed(2)
    assert np.array_equal(one, every_nth(labels, 5, 7))
    assert not np.array_equal(one, every_nth(labels, 5, 8))
