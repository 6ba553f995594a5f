import pytest
import torch

from fullstride.meanflow.objective.derivative import JVP_BACKENDS
from fullstride.meanflow.objective.flow_matching import FlowMatching
from fullstride.meanflow.objective.improved import ImprovedMeanFlow
from fullstride.meanflow.objective.loss import (
    MeanFlowLoss,
    conditional_velocity,
    interpolate,
    meanflow_target,
    squared_error,
)
from fullstride.meanflow.objective.times import LogitNormalV0, Uniform
from tests.meanflow.fields import GaussianField, batch_of_points
from tests.meanflow.objective.test_derivative import central_difference, random_unet


def data(seed: int, batch: int = 9) -> torch.Tensor:
    return torch.randn(batch, 3, 6, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_interpolation_runs_from_data_to_noise_at_the_conditional_velocity(seed):
    x, e, t, _ = batch_of_points(seed)
    torch.testing.assert_close(interpolate(x, e, torch.zeros_like(t)), x)
    torch.testing.assert_close(interpolate(x, e, torch.ones_like(t)), e)
    h = 1e-6
    slope = (interpolate(x, e, t + h) - interpolate(x, e, t - h)) / (2 * h)
    torch.testing.assert_close(conditional_velocity(x, e), slope, rtol=1e-7, atol=1e-7)


def test_the_target_of_an_exact_field_is_its_average_velocity(seed):
    """Fed the marginal velocity, u_tgt is u itself: the fixed point that training looks for."""
    field = GaussianField(mean=-0.3, std=0.6)
    z, _, t, r = batch_of_points(seed)
    v = field.velocity(z, t)
    dudt = central_difference(field, z, r, t, v)
    torch.testing.assert_close(meanflow_target(v, dudt, t, r), field(z, r, t), rtol=1e-7, atol=1e-7)


def test_the_target_has_no_gradient_and_is_v_where_the_times_meet(seed):
    v, dudt, t, r = batch_of_points(seed)
    dudt.requires_grad_()
    assert not meanflow_target(v, dudt, t, r).requires_grad
    torch.testing.assert_close(meanflow_target(v, dudt, t, t), v)


def test_squared_error_sums_over_elements_in_fp32_or_better():
    a, b = torch.full((2, 3, 4, 4), 2.0, dtype=torch.bfloat16), torch.zeros(2, 3, 4, 4, dtype=torch.bfloat16)
    assert squared_error(a, b).tolist() == [192.0, 192.0]
    assert squared_error(a, b).dtype == torch.float32
    assert squared_error(a.double(), b.double()).dtype == torch.float64


@pytest.mark.parametrize("backend", [b for b in JVP_BACKENDS if b != "finite_difference"])
def test_the_loss_is_the_papers_formula(backend, seed):
    """Against a derivation by hand: fp64 central differences, no code shared but the network."""
    net, x = random_unet(seed), data(seed)
    loss = MeanFlowLoss(ratio=0.5, weighting_power=0.75, weighting_eps=1e-3, backend=backend)
    e, t, r = loss.draw(x, torch.Generator().manual_seed(seed))
    assert (r < t).tolist() == [True] * 5 + [False] * 4
    got, metrics = loss.at(net, x, e, t, r)
    pixel = t[:, None, None, None]
    z, v = x - pixel * x + pixel * e, e - x
    with torch.no_grad():
        u = net(z, r, t)
        target = v - (t - r)[:, None, None, None] * central_difference(net, z, r, t, v)
        squares = ((u - target) ** 2).sum((1, 2, 3))
    torch.testing.assert_close(got, (squares / (squares + 1e-3) ** 0.75).mean(), rtol=1e-6, atol=0)
    torch.testing.assert_close(metrics["squared_error"], squares.mean() / 108, rtol=1e-6, atol=0)
    torch.testing.assert_close(metrics["squared_error_mf"], squares[:5].mean() / 108, rtol=1e-6, atol=0)
    torch.testing.assert_close(metrics["squared_error_fm"], squares[5:].mean() / 108, rtol=1e-6, atol=0)


def test_the_gradient_is_that_of_the_regression_on_a_fixed_target(seed):
    net, x = random_unet(seed), data(seed)
    loss = MeanFlowLoss(ratio=1.0, weighting_power=0.0)
    e, t, r = loss.draw(x, torch.Generator().manual_seed(seed))
    got = torch.autograd.grad(loss.at(net, x, e, t, r)[0], list(net.parameters()))
    z, v = interpolate(x, e, t), e - x
    target = v - (t - r)[:, None, None, None] * central_difference(net, z, r, t, v)
    expected = torch.autograd.grad((net(z, r, t) - target).square().sum((1, 2, 3)).mean(), list(net.parameters()))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("split", ["static", "full"])
def test_a_predicted_tangent_makes_the_improved_meanflow_loss(split, seed):
    """V = u + (t - r) sg(du/dt along u(z, t, t)) is regressed on e - x (arXiv:2512.02012), by hand in fp64."""
    net, x = random_unet(seed), data(seed)
    loss = ImprovedMeanFlow(ratio=0.5, weighting_power=0.75, weighting_eps=1e-3, split=split)
    e, t, r = loss.draw(x, torch.Generator().manual_seed(seed))
    got, metrics = loss.at(net, x, e, t, r)
    pixel, gap = t[:, None, None, None], (t - r)[:, None, None, None]
    z = (1 - pixel) * x + pixel * e
    dudt = central_difference(net, z, r, t, net(z, t, t).detach())
    squares = (net(z, r, t) + gap * dudt - (e - x)).square().sum((1, 2, 3))
    expected = (squares / (squares.detach() + 1e-3) ** 0.75).mean()
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(metrics["squared_error"], squares.mean() / 108, rtol=1e-6, atol=0)
    gradients = [torch.autograd.grad(value, list(net.parameters())) for value in (got, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)
    assert got != MeanFlowLoss(ratio=0.5, weighting_power=0.75, weighting_eps=1e-3, split=split).at(net, x, e, t, r)[0]


@pytest.mark.parametrize("split", ["static", "shared", "full"])
def test_another_network_may_predict_the_tangent(split, seed):
    """V = u + (t - r) sg(du/dt along the other's u(z, t, t)), by hand in fp64; its own weights get no gradient."""
    net, other, x = random_unet(seed), random_unet(seed + 10).train(), data(seed)
    loss = ImprovedMeanFlow(ratio=0.5, weighting_power=0.0, split=split, average=other)
    e, t, r = loss.draw(x, torch.Generator().manual_seed(seed))
    got, _ = loss.at(net, x, e, t, r)
    z = interpolate(x, e, t)
    dudt = central_difference(net, z, r, t, other(z, t, t).detach())
    expected = (net(z, r, t) + (t - r)[:, None, None, None] * dudt - (e - x)).square().sum((1, 2, 3)).mean()
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)
    got.backward()
    assert all(p.grad is None for p in other.parameters())
    assert other.training
    assert got != ImprovedMeanFlow(ratio=0.5, weighting_power=0.0, split=split).at(net, x, e, t, r)[0]


def test_with_a_predicted_tangent_an_exact_field_predicts_its_velocity_whatever_was_drawn(seed):
    """u + (t - r) du/dt is then a function of z alone; along e - x it depends on the draw."""
    field, x = GaussianField(mean=-0.3, std=0.6), data(seed)
    losses = [kind(ratio=1.0, weighting_power=0.0) for kind in (ImprovedMeanFlow, MeanFlowLoss)]
    e, t, r = losses[0].draw(x, torch.Generator().manual_seed(seed))
    exact = (field.velocity(interpolate(x, e, t), t) - (e - x)).square().sum((1, 2, 3)).mean()
    predicted, conditional = (loss.at(field, x, e, t, r)[0] for loss in losses)
    torch.testing.assert_close(predicted, exact, rtol=1e-9, atol=0)
    assert abs(conditional - exact) > 0.01 * exact


def test_the_predicted_tangent_is_taken_in_eval_mode_and_leaves_no_gradient(seed):
    net, x = random_unet(seed), data(seed)
    net.register_forward_hook(lambda model, args, out: seen.append((model.training, out.requires_grad)))
    seen, loss = [], ImprovedMeanFlow(ratio=1.0)
    loss.at(net.train(), x, *loss.draw(x, torch.Generator().manual_seed(seed)))
    assert seen[0] == (False, False)
    assert all(training for training, _ in seen[1:])
    assert net.training


def test_the_static_split_equals_bernoulli_in_expectation():
    """Over many batches both splits estimate one number; the spread of the mean bounds their difference."""
    field, x = GaussianField(0.2, 0.9), data(0, batch=400)
    draws = {}
    for split in ("static", "bernoulli"):
        loss = MeanFlowLoss(ratio=0.25, times=Uniform(), weighting_power=0.0, split=split)
        g = torch.Generator().manual_seed(1)
        draws[split] = torch.stack([loss(field, x, generator=g)[0] for _ in range(60)])
    difference = draws["static"].mean() - draws["bernoulli"].mean()
    spread = sum(d.var() / len(d) for d in draws.values()) ** 0.5
    assert abs(difference) < 4 * spread
    assert spread < 0.01 * draws["static"].mean()


@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
def test_the_whole_batch_in_the_jvp_gives_the_static_splits_loss(ratio, seed):
    """The derivative of samples with r = t counts t - r = 0 times."""
    net, x = random_unet(seed), data(seed)
    results = []
    for split in ("static", "full"):
        loss = MeanFlowLoss(ratio=ratio, split=split)
        e, t, r = loss.draw(x, torch.Generator().manual_seed(seed))
        assert (r < t).sum() == round(ratio * 9)
        value, metrics = loss.at(net, x, e, t, r)
        results.append([value, metrics["squared_error"], *torch.autograd.grad(value, list(net.parameters()))])
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-12)
    assert results[0][0] > 0


def test_bernoulli_takes_each_sample_with_the_ratio():
    loss = MeanFlowLoss(ratio=0.25, split="bernoulli")
    x = torch.zeros(4000, 1, 1, 1)
    _, t, r = loss.draw(x, torch.Generator().manual_seed(0))
    assert abs((r < t).double().mean() - 0.25) < 0.03


def test_flow_matching_is_meanflow_at_ratio_zero_without_weights(seed):
    net, x = random_unet(seed), data(seed)
    fm = FlowMatching(times=LogitNormalV0(-1.0, 0.5))
    e, t, r = fm.draw(x, torch.Generator().manual_seed(seed))
    assert torch.equal(r, t)
    loss, metrics = fm.at(net, x, e, t, r)
    expected = (net(interpolate(x, e, t), t, t) - (e - x)).square().sum((1, 2, 3)).mean()
    torch.testing.assert_close(loss, expected)
    assert set(metrics) == {"squared_error", "squared_error_fm"}


@pytest.mark.parametrize("split", ["static", "bernoulli"])
def test_the_same_generator_gives_the_same_loss(split):
    net, x = random_unet(0), data(0)
    loss = MeanFlowLoss(split=split)
    a, b, c = (loss(net, x, generator=torch.Generator().manual_seed(s))[0] for s in (3, 3, 4))
    assert a == b
    assert a != c


def test_impossible_settings_are_refused():
    with pytest.raises(ValueError, match=r"ratio=1.5: expected a share"):
        MeanFlowLoss(ratio=1.5)
    with pytest.raises(ValueError, match="split=half: expected one of shared, auto, full, static, bernoulli"):
        MeanFlowLoss(split="half")
    with pytest.raises(ValueError, match="weighting=mean: expected one of "):
        MeanFlowLoss(weighting="mean")
