import pytest
import torch

from benchmarks.tuning import frozen_statistics as script
from fullstride.meanflow.models.common import GroupNorm
from tests.meanflow.fields import batch_of_points
from tests.meanflow.objective.test_derivative import central_difference, random_unet


def test_held_statistics_change_the_derivative_and_not_the_values_and_are_let_go(seed):
    net = random_unet(seed)
    z, v, t, r = batch_of_points(seed, batch=4, shape=(3, 6, 6))
    before, exact = net(z, r, t), script.derivative(net, z, r, t, v)
    with script.holding(net, (z, r, t)):
        torch.testing.assert_close(net(z, r, t), before, rtol=1e-9, atol=1e-9)
        held = script.derivative(net, z, r, t, v)
        expected = central_difference(net, z, r, t, v)
    assert (held - expected).norm() < 1e-7 * expected.norm()
    assert (held - exact).norm() > 1e-2 * exact.norm()
    assert torch.equal(net(z, r, t), before)
    assert (exact - central_difference(net, z, r, t, v)).norm() < 1e-7 * exact.norm()


def test_a_norm_with_constant_statistics_is_affine(seed):
    norm = GroupNorm(8, 2).double()
    torch.manual_seed(seed)
    torch.nn.init.normal_(norm.weight)
    x, d = torch.randn(2, 3, 8, 4, 4, dtype=torch.float64)
    held = script.moments(norm, x)
    rstd = (x.view(3, 2, -1).var(-1, unbiased=False) + norm.eps).rsqrt()
    along = script.normalised(norm, held, x + d) - script.normalised(norm, held, x)
    expected = d * norm.weight.view(-1, 1, 1) * rstd.repeat_interleave(4, 1)[..., None, None]
    torch.testing.assert_close(along, expected, rtol=1e-10, atol=1e-10)


def test_error_and_cosine_are_those_of_the_targets_term(seed):
    net = random_unet(seed)
    z, v, t, r = batch_of_points(seed, batch=4, shape=(3, 6, 6))
    found, far = script.compared(net, z, r, t, v), (t - r)[:, None, None, None]
    term = far * central_difference(net, z, r, t, v)
    with script.holding(net, (z, r, t)):
        other = far * central_difference(net, z, r, t, v)
    assert found["error"] == pytest.approx(float((other - term).norm() / term.norm()), rel=1e-5)
    assert found["cosine"] == pytest.approx(float((other * term).sum() / other.norm() / term.norm()), abs=1e-6)
