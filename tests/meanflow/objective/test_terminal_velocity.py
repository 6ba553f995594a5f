import pytest
import torch

from fullstride.errors import ConfigError
from fullstride.meanflow.config.overrides import compose
from fullstride.meanflow.objective.loss import interpolate
from fullstride.meanflow.objective.terminal_velocity import TerminalVelocityMatching
from tests.meanflow.fields import GaussianField
from tests.meanflow.objective.test_derivative import random_unet
from tests.meanflow.objective.test_loss import data


def test_value_and_gradient_are_the_formulas(seed):
    """|df/dr - v(f, r)|^2 with f = z - (t - r) u, by differences through which the gradient goes, in fp64."""
    net, other, x = random_unet(seed), random_unet(seed + 10).train(), data(seed)
    loss = TerminalVelocityMatching(ratio=0.5, weighting_power=0.0, average=other)
    e, t, r = loss.draw(x, torch.Generator().manual_seed(seed))
    got, _ = loss.at(net, x, e, t, r)
    z, n, h = interpolate(x, e, t), 5, 1e-4

    def end(r):
        return z[:n] - (t[:n] - r)[:, None, None, None] * net(z[:n], r, t[:n])

    r = r[:n]
    slope = (8 * (end(r + h) - end(r - h)) - (end(r + 2 * h) - end(r - 2 * h))) / (12 * h)
    with torch.no_grad():
        v = other.eval()(end(r), r, r)
    terminal = (slope - v).square().sum((1, 2, 3))
    flow = (net(z[n:], t[n:], t[n:]) - (e - x)[n:]).square().sum((1, 2, 3))
    expected = torch.cat([terminal, flow]).mean()
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)
    gradients = [torch.autograd.grad(value, list(net.parameters())) for value in (got, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)
    assert all(p.grad is None for p in other.parameters())


def test_an_exact_field_has_no_terminal_error(seed):
    field, x = GaussianField(mean=0.4, std=0.7), data(seed)
    loss = TerminalVelocityMatching(ratio=1.0, weighting_power=0.0, average=field)
    value, _ = loss.at(field, x, *loss.draw(x, torch.Generator().manual_seed(seed)))
    assert value < 1e-16
    wrong = TerminalVelocityMatching(ratio=1.0, weighting_power=0.0, average=GaussianField(0.1, 0.7))
    assert wrong.at(field, x, *loss.draw(x, torch.Generator().manual_seed(seed)))[0] > 0.1


@pytest.mark.parametrize("override", ["loss.jvp_backend=two_pass", "loss.jvp_chunk=2", "loss.split=shared"])
def test_another_way_to_the_derivative_is_refused(override):
    with pytest.raises(ConfigError, match="the gradient goes through the derivative"):
        compose(["loss=tvm", override])
