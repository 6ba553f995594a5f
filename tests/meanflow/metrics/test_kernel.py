import numpy as np
import pytest
import torch
from sklearn.metrics.pairwise import polynomial_kernel

from fullstride.meanflow.metrics import distances
from fullstride.meanflow.metrics.distances import kernel_distance


def features(seed: int, n: int = 37, m: int = 53, d: int = 5):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, d, generator=g), torch.randn(m, d, generator=g) * 1.4 + 0.3


@pytest.mark.parametrize("block", [6, 2048])
def test_matches_scikit_learns_kernel(monkeypatch, block, seed):
    monkeypatch.setattr(distances, "BLOCK", block)
    x, y = features(seed)
    a, b = x.double().numpy(), y.double().numpy()
    xx, yy, xy = (polynomial_kernel(p, q, degree=3, gamma=1 / 5, coef0=1) for p, q in ((a, a), (b, b), (a, b)))
    np.fill_diagonal(xx, 0)
    np.fill_diagonal(yy, 0)
    expected = xx.sum() / (37 * 36) + yy.sum() / (53 * 52) - 2 * xy.mean()
    assert kernel_distance(x, y) == pytest.approx(expected, rel=1e-9)
    assert expected > 0.1


def test_equal_distributions_are_at_zero_on_average_at_any_count():
    g = torch.Generator().manual_seed(0)
    for n in (5, 40):
        pairs = [torch.randn(2, n, 4, generator=g) for _ in range(300)]
        values = torch.tensor([kernel_distance(*p) for p in pairs], dtype=torch.float64)
        assert abs(values.mean()) < 4 * values.std() / 300**0.5
        assert values.min() < 0


def test_what_cannot_be_compared_is_refused():
    x, y = features(0)
    with pytest.raises(ValueError, match="x has 5 features and y 4"):
        kernel_distance(x, y[:, :4])
    with pytest.raises(ValueError, match="x has 1 samples, expected at least 2"):
        kernel_distance(x[:1], y)
    y[3, 2] = float("inf")
    with pytest.raises(ValueError, match="y holds features that are not finite"):
        kernel_distance(x, y)
