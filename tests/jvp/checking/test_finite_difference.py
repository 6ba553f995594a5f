import pytest
import torch
from torch import Tensor

from fullstride.jvp.checking.finite_difference import differences


def points(seed: int, *shapes: tuple[int, ...]) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=g, dtype=torch.float64) for shape in shapes]


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e4])
@pytest.mark.parametrize("frequency", [1.0, 30.0, 1000.0])
def test_a_wave_of_any_frequency_along_a_tangent_of_any_size(frequency, size, seed):
    x, y, tx, ty = points(seed, (5,), (5,), (5,), (5,))
    f = lambda x, y: [(frequency * x).sin() * y, x + y]  # noqa: E731
    (wave, line), changes = differences(f, [x, y], [size * tx, size * ty])
    expected = size * (frequency * (frequency * x).cos() * y * tx + (frequency * x).sin() * ty)
    assert (wave - expected).norm() < 1e-8 * expected.norm()
    assert (line - size * (tx + ty)).norm() < 1e-8 * line.norm()
    assert all((c >= 0).all() for c in changes)
    assert changes[0].norm() < 1e-6 * expected.norm()


def test_a_kink_is_passed_on_its_own_side(seed):
    x, t = points(seed, (4000,), (4000,))
    (slope,), (change,) = differences(lambda x: [x.relu()], [x], [t])
    wrong = (slope - (x > 0) * t).abs() > 1e-6
    assert wrong.double().mean() < 1e-3
    assert (change[wrong] > 0).all()


def test_what_does_not_move_has_no_derivative(seed):
    x, t = points(seed, (3,), (3,))
    (constant,), _ = differences(lambda x: [torch.ones(2, dtype=torch.float64)], [x], [t])
    (still,), _ = differences(lambda x: [x.sin()], [x], [0 * t])
    assert not constant.any()
    assert not still.any()
