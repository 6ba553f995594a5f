import dataclasses

import pytest
import torch

from fullstride.meanflow.objective.loss import MeanFlowLoss, interpolate
from fullstride.meanflow.objective.tangent import TangentControl
from fullstride.meanflow.objective.teacher import Teacher
from tests.meanflow.fields import GaussianField
from tests.meanflow.objective.test_derivative import central_difference, random_unet
from tests.meanflow.objective.test_loss import data


@pytest.mark.parametrize("split", ["static", "shared", "full"])
def test_the_target_is_made_of_the_teachers_velocity(split, seed):
    """u_tgt = v_T - (t - r) du/dt along v_T (MFD), by hand in fp64; the teacher keeps its mode and has no gradient."""
    net, other, x = random_unet(seed), random_unet(seed + 10).train(), data(seed)
    loss = MeanFlowLoss(ratio=0.5, weighting_power=0.75, weighting_eps=1e-3, split=split, teacher=Teacher(other))
    e, t, r = loss.draw(x, torch.Generator().manual_seed(seed))
    got, _ = loss.at(net, x, e, t, r)
    z, gap = interpolate(x, e, t), (t - r)[:, None, None, None]
    with torch.no_grad():
        taught = other.eval()(z, t, t)
    target = taught - gap * central_difference(net, z, r, t, taught)
    squares = (net(z, r, t) - target).square().sum((1, 2, 3))
    expected = (squares / (squares.detach() + 1e-3) ** 0.75).mean()
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)
    gradients = [torch.autograd.grad(value, list(net.parameters())) for value in (got, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)
    assert all(p.grad is None for p in other.parameters())


def test_an_exact_field_taught_by_its_own_velocity_has_no_error(seed):
    """The loss of the fixed point is 0 whatever was drawn; by the samples' own velocities it is not."""
    field, x = GaussianField(mean=-0.3, std=0.6), data(seed)
    loss = MeanFlowLoss(ratio=1.0, weighting_power=0.0, teacher=Teacher(field))
    drawn = loss.draw(x, torch.Generator().manual_seed(seed))
    assert loss.at(field, x, *drawn)[0] < 1e-16
    assert dataclasses.replace(loss, teacher=None).at(field, x, *drawn)[0] > 1


class Labelled(torch.nn.Module):
    """v = (label + 1) z, and -2 z for 'no class', which is 3."""

    def forward(self, z, r, t, label):
        return torch.where(label == 3, -2.0, label + 1.0)[:, None] * z


def test_a_teacher_is_guided_within_its_interval(seed):
    z = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    t, label = torch.tensor([0.1, 0.3, 0.7, 0.9], dtype=torch.float64), torch.tensor([0, 1, 2, 0])
    got = Teacher(Labelled(), 3, scale=2.5, start=0.3, end=0.8).velocity(z, t, {"label": label})
    factors = torch.tensor([1.0, -2 + 2.5 * (2 + 2), -2 + 2.5 * (3 + 2), 1.0], dtype=torch.float64)
    torch.testing.assert_close(got, factors[:, None] * z)
    with pytest.raises(ValueError, match="no labels"):
        Teacher(lambda z, r, t: z, 3, scale=2.0).velocity(z, t, {})
    with pytest.raises(ValueError, match="without classes"):
        Teacher(Labelled(), scale=2.0)
    with pytest.raises(ValueError, match="start no larger"):
        Teacher(Labelled(), start=0.6, end=0.5)
    with pytest.raises(ValueError, match="teacher's output"):
        Teacher(lambda z, r, t: z[:, :1]).velocity(z, t, {})


def test_the_derivative_enters_by_its_warm_up_and_up_to_its_limit(seed):
    g = torch.Generator().manual_seed(seed)
    dudt, gap = torch.randn(3, 2, 3, 3, generator=g, dtype=torch.float64), torch.tensor([0.5, 0.25, 0.0]).double()
    progress = torch.tensor([0.05, 0.2, 0.9], dtype=torch.float64)
    warm = TangentControl(warmup=0.1)(dudt, gap, progress)
    torch.testing.assert_close(warm, torch.tensor([0.5, 1, 1]).double()[:, None, None, None] * dudt)
    assert TangentControl()(dudt, gap, None) is dudt
    rms = (gap[:, None, None, None] * dudt).square().mean((1, 2, 3)).sqrt()
    limit = float(rms[:2].mean())
    limited = TangentControl(limit=limit)(dudt, gap, None)
    factor = torch.where(rms > limit, limit / rms, 1.0)[:, None, None, None]
    torch.testing.assert_close(limited, factor * dudt, rtol=1e-6, atol=0)
    assert (factor < 1).any()
    with pytest.raises(ValueError, match="without progress"):
        TangentControl(warmup=0.1)(dudt, gap, None)


@pytest.mark.parametrize("split", ["static", "shared"])
def test_at_the_start_of_a_warm_up_each_interval_is_flow_matching(split, seed):
    net, x = random_unet(seed), data(seed)
    loss = MeanFlowLoss(ratio=0.5, weighting_power=0.0, split=split, tangent=TangentControl(warmup=0.5))
    e, t, r = loss.draw(x, torch.Generator().manual_seed(seed))
    z = interpolate(x, e, t)
    expected = (net(z, r, t) - (e - x)).square().sum((1, 2, 3)).mean()
    start = loss.at(net, x, e, t, r, progress=torch.zeros(len(x), dtype=x.dtype))[0]
    torch.testing.assert_close(start, expected, rtol=1e-9, atol=0)
    end = loss.at(net, x, e, t, r, progress=torch.full((len(x),), 0.5, dtype=x.dtype))[0]
    plain = dataclasses.replace(loss, tangent=TangentControl())
    torch.testing.assert_close(end, plain.at(net, x, e, t, r)[0], rtol=1e-12, atol=0)
    called = loss(net, x, progress=0.25, generator=torch.Generator().manual_seed(seed))[0]
    assert called not in (start, end)
