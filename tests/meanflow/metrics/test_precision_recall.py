import numpy as np
import pytest
import torch
from scipy.spatial.distance import cdist

from fullstride.meanflow.metrics import distances as module
from fullstride.meanflow.metrics.distances import precision_recall


def naive(x: torch.Tensor, y: torch.Tensor, k: int) -> tuple[float, float]:
    a, b = x.double().numpy(), y.double().numpy()

    def within(points: np.ndarray, centres: np.ndarray) -> float:
        radii = np.sort(cdist(centres, centres), axis=1)[:, k]
        return float((cdist(points, centres) <= radii).any(axis=1).mean())

    return within(a, b), within(b, a)


def features(seed: int, n: int, m: int, d: int = 4):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, d, generator=g) * 0.7 + 0.4, torch.randn(m, d, generator=g)


@pytest.mark.parametrize("block", [5, 2048])
@pytest.mark.parametrize(("n", "m", "k"), [(61, 97, 3), (97, 61, 1), (4, 31, 3), (6, 6, 5)])
def test_matches_all_distances_at_once(monkeypatch, block, n, m, k, seed):
    monkeypatch.setattr(module, "BLOCK", block)
    x, y = features(seed, n, m)
    expected = naive(x, y, k)
    assert precision_recall(x, y, k) == pytest.approx(expected, abs=1e-12)
    assert n < 10 or 0 < expected[1] < expected[0] <= 1


def test_roles_swap(seed):
    x, y = features(seed, 61, 97)
    assert precision_recall(y, x) == precision_recall(x, y)[::-1]


def test_a_set_covers_itself_and_far_clusters_nothing(seed):
    x, y = features(seed, 40, 55)
    assert precision_recall(x, x.flip(0)) == (1.0, 1.0)
    assert precision_recall(x + 100, y) == (0.0, 0.0)


def test_half_of_the_modes_is_precise_but_recalls_half():
    x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0)) * 0.01
    y = torch.cat([x[:30] + 1e-4, x[30:] + 50])
    precision, recall = precision_recall(x, y)
    assert precision > 0.9
    assert recall == 0.5


def test_copies_of_one_picture_have_balls_of_radius_zero_that_still_hold_it(seed):
    """Features far from zero, where a product of matrices does not give a row distance 0 to its copy."""
    x, y = features(seed, 9, 40, d=64)
    x = x[:1].expand(9, -1) + 1000
    y = y + 1000
    y[:5] = x[:5]
    precision, recall = precision_recall(x, y)
    assert precision == 1.0
    assert recall == 5 / 40


def test_a_common_offset_changes_nothing(seed):
    x, y = (a.double() for a in features(seed, 61, 97))
    assert precision_recall(x + 1e6, y + 1e6) == precision_recall(x, y)


def test_what_cannot_be_compared_is_refused():
    x, y = features(0, 20, 20)
    with pytest.raises(ValueError, match="x has 3 samples, expected at least 4"):
        precision_recall(x[:3], y)
    with pytest.raises(ValueError, match="x has 4 features and y 3"):
        precision_recall(x, y[:, :3])
    with pytest.raises(ValueError, match="k is 0, expected at least 1"):
        precision_recall(x, y, 0)
    x[1, 1] = float("nan")
    with pytest.raises(ValueError, match="x holds features that are not finite"):
        precision_recall(x, y)
