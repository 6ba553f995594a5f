import numpy as np
import pytest
import torch
from scipy import stats

from fullstride.meanflow.objective.times import (
    BatchTime,
    LogitNormalV0,
    LogitNormalV1,
    Uniform,
    logit_normal,
    meanflow_count,
)

N = 20_000


def logit_cdf(mean, std):
    return lambda t: stats.norm(mean, std).cdf(np.log(t) - np.log1p(-t))


def fits(sample: torch.Tensor, cdf) -> bool:
    """Kolmogorov-Smirnov at a level that a right sampler misses once in 10,000 seeds."""
    return stats.kstest(sample.double().numpy(), cdf).pvalue > 1e-4


def gen(seed):
    return torch.Generator().manual_seed(seed)


def test_logit_normal_follows_its_density(seed):
    assert fits(logit_normal(N, -0.6, 1.6, generator=gen(seed)), logit_cdf(-0.6, 1.6))
    assert not fits(logit_normal(N, -0.6, 1.6, generator=gen(seed)), logit_cdf(-0.5, 1.6))


def test_v0_is_the_larger_and_the_smaller_of_two_draws(seed):
    t, r = LogitNormalV0(-0.4, 1.0)(N, generator=gen(seed))
    cdf = logit_cdf(-0.4, 1.0)
    assert (r <= t).all()
    assert fits(t, lambda x: cdf(x) ** 2)
    assert fits(r, lambda x: 1 - (1 - cdf(x)) ** 2)


def test_v1_keeps_the_law_of_t_and_caps_r(seed):
    t, r = LogitNormalV1(-0.6, 1.6, -4.0, 1.6)(N, generator=gen(seed))
    assert (r <= t).all()
    assert fits(t, logit_cdf(-0.6, 1.6))
    # P(min(t, r) > x) = P(t > x) P(r > x) for independent draws.
    t_cdf, r_cdf = logit_cdf(-0.6, 1.6), logit_cdf(-4.0, 1.6)
    assert fits(r, lambda x: 1 - (1 - t_cdf(x)) * (1 - r_cdf(x)))


def test_uniform_is_the_larger_and_the_smaller_of_two_draws(seed):
    t, r = Uniform()(N, generator=gen(seed))
    assert (r <= t).all()
    assert fits(t, lambda x: x**2)
    assert fits(r, lambda x: 1 - (1 - x) ** 2)


def test_batch_time_repeats_one_draw(seed):
    law = LogitNormalV1()
    t, r = BatchTime(law)(5, generator=gen(seed))
    one_t, one_r = law(1, generator=gen(seed))
    assert torch.equal(t, one_t.repeat(5))
    assert torch.equal(r, one_r.repeat(5))


@pytest.mark.parametrize(
    ("ratio", "batch", "count"), [(0.0, 9, 0), (0.25, 64, 16), (0.25, 10, 3), (0.75, 10, 8), (1.0, 7, 7)]
)
def test_meanflow_count_rounds_half_up(ratio, batch, count):
    assert meanflow_count(ratio, batch) == count


@pytest.mark.parametrize("ratio", [-0.1, 1.1])
def test_meanflow_count_refuses_a_ratio_outside_the_unit_interval(ratio):
    with pytest.raises(ValueError, match=rf"meanflow_ratio is {ratio}, expected a share in \[0, 1\]"):
        meanflow_count(ratio, 10)
