import pytest
import torch
from scipy import stats
from scipy.spatial.distance import cdist

from fullstride.meanflow.metrics import energy
from fullstride.meanflow.metrics.distances import squared_distances
from fullstride.meanflow.metrics.energy import EnergyReference, energy_distance


def samples(seed: int, n: int = 37, m: int = 53, shape=(2, 3, 3)):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, *shape, generator=g), torch.randn(m, *shape, generator=g) * 1.5 + 0.3


def test_matches_scipy_in_one_dimension(seed):
    x, y = samples(seed, shape=(1,))
    expected = stats.energy_distance(x[:, 0].numpy(), y[:, 0].numpy()) ** 2
    assert energy_distance(x, y, unbiased=False) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("block", [5, 1024])
def test_matches_the_definition_in_many_dimensions(monkeypatch, block, seed):
    monkeypatch.setattr(energy, "BLOCK", block)
    x, y = samples(seed)
    a, b = x.flatten(1).double().numpy(), y.flatten(1).double().numpy()
    between, within_a, within_b = cdist(a, b).mean(), cdist(a, a), cdist(b, b)
    v = 2 * between - within_a.mean() - within_b.mean()
    u = 2 * between - within_a.sum() / (37 * 36) - within_b.sum() / (53 * 52)
    assert energy_distance(x, y, unbiased=False) == pytest.approx(v, rel=1e-9)
    assert energy_distance(x, y) == pytest.approx(u, rel=1e-9)
    assert v > 0.05


def test_what_is_within_a_reference_is_summed_once_and_pairs_within_a_set_once(monkeypatch, seed):
    (x, y), taken = samples(seed), []
    distances = energy._distances
    monkeypatch.setattr(energy, "BLOCK", 10)  # 4 and 6 blocks
    monkeypatch.setattr(energy, "_distances", lambda a, b, c: taken.append((len(a), len(b))) or distances(a, b, c))
    reference = EnergyReference(y)
    assert len(taken) == 6 * 7 // 2
    found = [reference.distances(sample) for sample in (x, x + 1)]
    assert len(taken) == 6 * 7 // 2 + 2 * (4 * 6 + 4 * 5 // 2)
    assert reference.count == 53
    for sample, both in zip((x, x + 1), found, strict=True):
        expected = energy_distance(sample, y), energy_distance(sample, y, unbiased=False)
        assert both == pytest.approx(expected, rel=1e-12)


def test_samples_may_be_plain_numbers(seed):
    x, y = samples(seed, shape=())
    expected = stats.energy_distance(x.numpy(), y.numpy()) ** 2
    assert energy_distance(x, y, unbiased=False) == pytest.approx(expected, rel=1e-9)


def test_equal_distributions_are_at_zero_on_average():
    g = torch.Generator().manual_seed(0)
    values = torch.tensor(
        [energy_distance(*torch.randn(2, 20, 3, generator=g)) for _ in range(300)], dtype=torch.float64
    )
    assert abs(values.mean()) < 4 * values.std() / 300**0.5


def test_a_shift_of_an_image_far_from_zero_is_not_lost_to_rounding():
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    near = energy_distance(x, x + 1e-3, unbiased=False)
    assert energy_distance(x + 1e4, x + 1e4 + 1e-3, unbiased=False) == pytest.approx(near, rel=1e-4)
    assert near > 0


@pytest.mark.parametrize("offset", [0.0, 300.0])
def test_equal_and_nearly_equal_images_are_at_their_distances(seed, offset):
    """Nearly equal images are the hardest case: a product of matrices loses the most digits on them."""
    x, y = samples(seed, shape=(3, 16, 16))
    y[:20], y[20:30] = x[:20], x[:10] + 1e-4
    x, y = x.double() + offset, y.double() + offset
    a, b = x.flatten(1).numpy(), y.flatten(1).numpy()
    expected = 2 * cdist(a, b).mean() - cdist(a, a).mean() - cdist(b, b).mean()
    assert energy_distance(x, y, unbiased=False) == pytest.approx(expected, rel=1e-9)
    pairs = squared_distances(*((s - y.flatten(1).mean(0)) for s in (x.flatten(1), y.flatten(1)))).sqrt()
    assert not pairs.diagonal()[:20].any()
    near = torch.from_numpy(cdist(a, b))[range(10), range(20, 30)]
    assert torch.allclose(pairs[range(10), range(20, 30)], near, rtol=1e-4)
    assert abs(energy_distance(y, y, unbiased=False)) < 1e-12


def test_what_cannot_be_compared_is_refused():
    x, y = samples(0)
    with pytest.raises(ValueError, match=r"shape \(2, 3, 3\) and y of \(2, 9\)"):
        energy_distance(x, y.reshape(53, 2, 9))
    with pytest.raises(ValueError, match="x has 1 samples, expected at least 2"):
        energy_distance(x[:1], y)
    y[3:5] = float("nan")
    with pytest.raises(ValueError, match="2 of 53 samples of y are not finite"):
        energy_distance(x, y)
