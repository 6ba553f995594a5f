import numpy as np
import pytest
import torch
from scipy import linalg

from fullstride.meanflow.metrics import distances
from fullstride.meanflow.metrics.distances import frechet_distance, moments


def features(seed: int, n: int = 80, m: int = 90, d: int = 7):
    g = torch.Generator().manual_seed(seed)
    mix = torch.randn(d, d, generator=g)
    return torch.randn(n, d, generator=g) @ mix, torch.randn(m, d, generator=g) * 1.3 + 0.5


def test_matches_scipys_matrix_root(seed):
    x, y = (a.double().numpy() for a in features(seed))
    c, e = np.cov(x.T), np.cov(y.T)
    root = np.real(linalg.sqrtm(c @ e))
    expected = ((x.mean(0) - y.mean(0)) ** 2).sum() + np.trace(c + e - 2 * root)
    assert frechet_distance(*features(seed)) == pytest.approx(expected, rel=1e-8)


def test_matches_the_closed_form_of_known_gaussians():
    """Samples whose moments are exactly (0, diag(a^2)) and (shift, diag(b^2)): sum (a - b)^2 + |shift|^2."""
    a, b, shift = torch.tensor([1.0, 2.0, 0.5]), torch.tensor([3.0, 0.1, 0.5]), torch.tensor([1.0, -2.0, 0.0])
    a, b, shift = a.double(), b.double(), shift.double()
    signs = torch.cat([torch.eye(3), -torch.eye(3)]).double() * (5 / 2) ** 0.5
    expected = ((a - b) ** 2).sum() + (shift**2).sum()
    assert frechet_distance(signs * a, signs * b + shift) == pytest.approx(expected.item(), rel=1e-9)


def test_a_common_rotation_and_shift_changes_nothing(seed):
    x, y = (a.double() for a in features(seed))
    q, _ = torch.linalg.qr(torch.randn(7, 7, dtype=torch.float64))
    assert frechet_distance(x @ q + 3, y @ q + 3) == pytest.approx(frechet_distance(x, y), rel=1e-9)


def test_fewer_samples_than_features_stay_finite(seed):
    x, y = features(seed, n=5, m=6, d=20)
    assert 0 < frechet_distance(x, y) < float("inf")
    assert -1e-9 <= frechet_distance(x, x) < 1e-9


def test_a_single_feature_works():
    x = torch.tensor([[0.0], [2.0]])
    assert frechet_distance(x, x + 3) == pytest.approx(9.0)


def test_what_cannot_be_compared_is_refused():
    x, y = features(0)
    with pytest.raises(ValueError, match="x has 7 features and y 6"):
        frechet_distance(x, y[:, :6])
    with pytest.raises(ValueError, match="y has 1 samples"):
        frechet_distance(x, y[:1])
    x[0, 0] = float("inf")
    with pytest.raises(ValueError, match="x holds features that are not finite"):
        frechet_distance(x, y)


@pytest.mark.parametrize(("offset", "block"), [(0, 8192), (100, 9), (1e6, 13)])
def test_moments_are_numpys_whatever_the_block_and_far_from_zero(monkeypatch, seed, offset, block):
    x = features(seed)[0].double() + offset
    monkeypatch.setattr(distances, "COPIED", block)
    mean, covariance = moments(x)
    np.testing.assert_allclose(mean, x.numpy().mean(0), rtol=1e-13)
    exact = np.cov(features(seed)[0].double().numpy().T)
    np.testing.assert_allclose(covariance, exact, rtol=1e-7 if offset == 1e6 else 1e-11, atol=1e-8 if offset else 1e-13)


def test_fewer_samples_of_one_distribution_score_worse():
    """The bias that makes counts part of the value."""
    x, y = torch.randn(2, 4000, 6, generator=torch.Generator().manual_seed(0))
    values = [frechet_distance(x[:n], y[:n]) for n in (50, 400, 4000)]
    assert values[0] > 3 * values[1] > 9 * values[2] > 0
