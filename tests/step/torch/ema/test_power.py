"""Power-function averages against their closed-form profile, and averages made of stored ones."""

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from torch import nn

from fullstride.step.torch import Averages, Power
from fullstride.step.torch.ema.power import combination, overlap


def profile(power: Power, at: int, period: int = 1) -> np.ndarray:
    """Each update's share of the average at a step: the integral of p over the steps that it stands for."""
    ends = np.arange(period, at + 1, period, dtype=np.float64)
    g = power.exponent + 1
    return (ends**g - (ends - period) ** g) / ends[-1] ** g


@pytest.mark.parametrize("width", [0.02, 0.1, 0.25])
def test_the_width_is_the_standard_deviation_over_the_training(width):
    g = Power(width).exponent
    moments = [quad(lambda s, k=k: (g + 1) * s ** (g + k), 0, 1)[0] for k in range(3)]
    assert moments[0] == pytest.approx(1, rel=1e-9)
    assert (moments[2] - moments[1] ** 2) ** 0.5 == pytest.approx(width, rel=1e-7)


@pytest.mark.parametrize("period", [1, 4])
def test_the_average_has_the_closed_forms_profile(period, seed):
    steps, powers = 48, [Power(0.05), Power(0.2)]
    model = nn.Linear(3, 2).double()
    ema = Averages(model, [0.9, *powers], period, warmup=False)
    g, weights = torch.Generator().manual_seed(seed), []
    for step in range(1, steps + 1):
        nn.init.normal_(model.weight, generator=g)
        ema.update(step)
        if step % period == 0:
            weights.append(model.weight.detach().numpy().copy())
    for power in powers:
        expected = np.tensordot(profile(power, steps, period), np.stack(weights), 1)
        np.testing.assert_allclose(ema.models[power].weight.numpy(), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize(("a", "b"), [((7.0, 0.05), (11.0, 0.2)), ((11.0, 0.05), (7.0, 0.2)), ((9.0, 0.1), (9.0, 0.1))])
def test_the_overlap_is_the_integral_of_the_product(a, b):
    (t, u), (g, h) = (a[0], b[0]), (Power(a[1]).exponent, Power(b[1]).exponent)
    product = lambda s: (g + 1) * s**g / t ** (g + 1) * (h + 1) * s**h / u ** (h + 1)  # noqa: E731
    expected = quad(product, 0, min(t, u))[0]
    assert overlap((t, Power(a[1])), (u, Power(b[1]))) == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize("width", [0.04, 0.07, 0.15])
def test_an_average_of_another_length_is_a_sum_of_stored_ones(width):
    steps = 512
    stored = [(float(at), power) for at in range(32, steps + 1, 32) for power in (Power(0.05), Power(0.1))]
    factors, distance = combination(stored, (float(steps), Power(width)))
    made = np.zeros(steps)
    for factor, (at, power) in zip(factors, stored, strict=True):
        made[: int(at)] += factor * profile(power, int(at))
    wanted = profile(Power(width), steps)
    assert distance < 0.05
    assert np.linalg.norm(made - wanted) / np.linalg.norm(wanted) == pytest.approx(distance, rel=0.2, abs=2e-3)
    assert made.sum() == pytest.approx(1, abs=1e-9)


def test_a_stored_average_is_itself_and_a_far_one_is_told_to_be_far():
    stored = [(100.0, Power(0.1)), (50.0, Power(0.1))]
    factors, distance = combination(stored, stored[0])
    np.testing.assert_allclose(factors, [1, 0], atol=1e-9)
    assert distance < 1e-6
    assert combination(stored, (100.0, Power(0.01)))[1] > 0.5


@pytest.mark.parametrize("width", [0.0, -0.1, 0.2887, float("nan")])
def test_a_width_that_no_power_has_is_refused(width):
    with pytest.raises(ValueError, match="expected a number above 0 and below"):
        Power(width)
