import torch

from fullstride.meanflow.config.networks import MODELS
from fullstride.meanflow.models.x_prediction import XPrediction
from fullstride.meanflow.objective.derivative import velocity_and_derivative, velocity_and_some_derivatives
from fullstride.meanflow.objective.loss import MeanFlowLoss, interpolate
from fullstride.meanflow.sampling.samplers import meanflow_sample
from fullstride.meanflow.training.build import build_model
from tests.meanflow.fields import batch_of_points
from tests.meanflow.models.test_mit import inputs, random_mit
from tests.meanflow.objective.test_derivative import central_difference, random_unet
from tests.meanflow.objective.test_loss import data


def test_one_step_ends_at_the_prediction_and_small_times_are_bounded(seed):
    net, z = random_unet(seed), data(seed)
    one, zero = torch.ones(9, dtype=z.dtype), torch.zeros(9, dtype=z.dtype)
    torch.testing.assert_close(meanflow_sample(XPrediction(net), z).images, net(z, zero, one))
    small = torch.full((9,), 0.01, dtype=z.dtype)
    torch.testing.assert_close(XPrediction(net)(z, zero, small), (z - net(z, zero, small)) / 0.05)


def test_the_derivative_is_that_of_central_differences(seed):
    net = XPrediction(random_unet(seed))
    z, v, t, r = batch_of_points(seed, batch=5, shape=(3, 6, 6))
    expected = central_difference(lambda z, r, t, label: net(z, r, t), z, r, t, v)
    _, dudt = velocity_and_derivative(net, z, r, t, v)
    assert (dudt - expected).norm() / expected.norm() < 1e-6
    _, some = velocity_and_some_derivatives(net, z, r, t, v[:2])
    assert (some - expected[:2]).norm() / expected[:2].norm() < 1e-6


def test_in_flow_matching_it_is_the_error_of_the_image_over_the_square_of_the_time(seed):
    """||(z - x) / t - (e - x0)||^2 = ||x - x0||^2 / t^2, as z - t (e - x0) = x0."""
    net, x = random_unet(seed), data(seed)
    loss = MeanFlowLoss(ratio=0.0, weighting_power=0.0)
    e, t, r = loss.draw(x, torch.Generator().manual_seed(seed))
    t = r = t.clamp_min(0.05)
    expected = ((net(interpolate(x, e, t), t, t) - x).square().sum((1, 2, 3)) / t**2).mean()
    torch.testing.assert_close(loss.at(XPrediction(net), x, e, t, r)[0], expected, rtol=1e-9, atol=0)


def test_both_outputs_of_a_network_with_a_head_for_v_are_images(seed):
    net = random_mit(seed)
    (z, r, t, _), given = inputs(seed)
    images = net(z, r, t, **given, both=True)
    expected = (torch.cat([z, z], 1) - images) / t[:, None, None, None]
    torch.testing.assert_close(XPrediction(net)(z, r, t, **given, both=True), expected)


def test_a_setting_chooses_the_prediction():
    made = build_model(MODELS["unet_tiny"](prediction="x"), (1, 8, 8), 0)
    assert isinstance(made, XPrediction)
    assert not isinstance(build_model(MODELS["unet_tiny"](), (1, 8, 8), 0), XPrediction)
