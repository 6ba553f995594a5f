import numpy as np
import pytest
import torch
from torch import logit

from fullstride.meanflow.objective.huber import expected_error, huber_weight
from fullstride.meanflow.objective.loss import SPLITS, MeanFlowLoss, interpolate
from fullstride.meanflow.objective.weighting import adaptive_weight


@pytest.mark.parametrize("power", [0.0, 0.5, 0.75, 1.0])
@pytest.mark.parametrize("c", [1e-3, 1e-2])
def test_matches_the_formula_in_double_precision(power, c, seed):
    error = torch.rand(11, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 100
    expected = 1 / (error.numpy() + c) ** power
    np.testing.assert_allclose(adaptive_weight(error, power, c).numpy(), expected, rtol=1e-12)


def test_no_gradient_flows_through_the_weight():
    error = torch.tensor([2.0, 3.0], requires_grad=True)
    (adaptive_weight(error, 1.0, 1e-2) * error).sum().backward()
    assert error.grad is not None
    torch.testing.assert_close(error.grad, 1 / (error.detach() + 1e-2))


def test_a_loss_of_mean_squares_is_this_one_with_eps_times_the_elements(seed):
    elements, power, c = 37, 0.75, 1e-2
    generator = torch.Generator().manual_seed(seed)
    error = torch.randn(5, elements, generator=generator, dtype=torch.float64, requires_grad=True)
    total, mean = error.square().sum(1), error.square().mean(1)
    ours = (adaptive_weight(total, power, c * elements) * total).mean()
    theirs = (mean / (mean.detach() + c) ** power).mean()
    torch.testing.assert_close(ours, elements ** (1 - power) * theirs)
    gradients = [torch.autograd.grad(loss, error)[0] for loss in (ours, theirs)]
    torch.testing.assert_close(gradients[0], elements ** (1 - power) * gradients[1])


@pytest.mark.parametrize(("power", "c"), [(-1.0, 1e-3), (1.0, 0.0)])
def test_refuses_what_has_no_meaning(power, c):
    with pytest.raises(ValueError, match="expected power >= 0 and eps > 0"):
        adaptive_weight(torch.ones(2), power, c)


def _times(count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """t in (0, 1), and r below it for half of them."""
    t, share = torch.rand(2, count, generator=generator, dtype=torch.float64)
    return t, torch.where(torch.arange(count) % 2 == 0, t, share * t)


def test_the_expected_error_is_the_kernel_regression_of_the_others(seed):
    generator = torch.Generator().manual_seed(seed)
    (t, r), error = _times(13, generator), torch.rand(13, generator=generator, dtype=torch.float64) * 50
    far = ((logit(t)[:, None] - logit(t)) / 0.5) ** 2 + (((step := 1 - r / t)[:, None] - step) / 0.2) ** 2
    kernel = np.exp(-0.5 * far.numpy()) * (1 - np.eye(13))
    wanted = (kernel * error.numpy()).sum(1) / kernel.sum(1)
    np.testing.assert_allclose(expected_error(error, t, r).numpy(), wanted, rtol=1e-4)


def test_a_samples_own_error_is_not_expected(seed):
    generator = torch.Generator().manual_seed(seed)
    (t, r), error = _times(7, generator), torch.rand(7, generator=generator, dtype=torch.float64)
    other = error.clone()
    other[3] = 1e6
    before, after = (expected_error(e, t, r) for e in (error, other))
    assert before[3] == after[3]
    assert (after[torch.arange(7) != 3] > before[torch.arange(7) != 3]).all()


@pytest.mark.parametrize("ends", [(0.0, 0.0), (1.0, 1.0), (1.0, 0.0), (1e-6, 1.0)])
def test_what_is_expected_is_finite_at_the_ends_of_time(ends):
    t = torch.tensor([*ends, 0.5])
    found = expected_error(torch.tensor([1.0, 2.0, 3.0]), t, t * 0.5)
    assert ((found >= 1) & (found <= 3)).all()


def test_one_time_for_a_whole_batch_expects_the_mean_of_the_others(seed):
    error = torch.rand(5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    same = torch.full((5,), 0.3, dtype=torch.float64)
    torch.testing.assert_close(expected_error(error, same, same), (error.sum() - error) / 4)


def test_a_sample_weighs_by_its_own_error_where_that_is_the_greater_one(seed):
    generator = torch.Generator().manual_seed(seed)
    (t, r), error = _times(31, generator), torch.rand(31, generator=generator, dtype=torch.float64) * 9
    expected, found = expected_error(error, t, r), huber_weight(error, t, r, 0.75, 1e-3)
    above = error > expected
    assert 0 < above.sum() < 31
    torch.testing.assert_close(found[above], adaptive_weight(error, 0.75, 1e-3)[above])
    torch.testing.assert_close(found[~above], adaptive_weight(expected, 0.75, 1e-3)[~above])


def test_what_it_is_least_at_is_nearer_the_mean(seed):
    """Half of the samples lie closely about one point and half widely about another, at times alike."""
    generator, size = torch.Generator().manual_seed(seed), 400
    spread = torch.where(torch.arange(size) % 2 == 0, 0.1, 2.0)[:, None]
    x = spread.sign() * (spread > 1) + spread * torch.randn(size, 16, generator=generator)
    t = torch.full((size,), 0.5)
    off = {}
    for name, weigh in (("adaptive", adaptive_weight), ("huber", lambda e, p: huber_weight(e, t, t, p))):
        at = x.mean(0)
        for _ in range(50):  # iteratively reweighted means, as the weight carries no gradient
            weight = weigh((x - at).square().sum(1), 0.75)
            at = (weight[:, None] * x).sum(0) / weight.sum()
        off[name] = (at - x.mean(0)).norm().item()
    assert 0 < off["huber"] < 0.6 * off["adaptive"]


@pytest.mark.parametrize("split", SPLITS)
def test_the_loss_weighs_so(split, seed):
    torch.manual_seed(seed)
    scale = torch.nn.Parameter(torch.rand((), dtype=torch.float64))

    def net(z, r, t, **_):
        return scale * z.sin() * (1 + r * t)[:, None, None, None]

    loss = MeanFlowLoss(0.5, weighting_power=0.75, weighting_eps=1e-3, split=split, weighting="huber")
    x = torch.randn(9, 1, 3, 3, dtype=torch.float64)
    e, t, r = loss.draw(x)
    value, _ = loss.at(net, x, e, t, r)
    z, v = interpolate(x, e, t), e - x
    u, dudt = torch.func.jvp(net, (z, r, t), (v, torch.zeros_like(r), torch.ones_like(t)))[:2]
    error = (u - v + (t - r)[:, None, None, None] * dudt.detach()).square().flatten(1).sum(1)
    wanted = (huber_weight(error, t, r, 0.75, 1e-3) * error).mean()
    torch.testing.assert_close(value, wanted)
    gradients = [torch.autograd.grad(found, scale)[0] for found in (value, wanted)]
    torch.testing.assert_close(*gradients)
    assert (
        value - MeanFlowLoss(0.5, weighting_power=0.75, weighting_eps=1e-3, split=split).at(net, x, e, t, r)[0]
    ).abs() > 1e-6


def test_a_batch_of_one_has_nothing_to_expect():
    with pytest.raises(ValueError, match="weighting=huber with a batch of 1, expected at least 2 samples"):
        expected_error(torch.ones(1), torch.ones(1), torch.ones(1))
