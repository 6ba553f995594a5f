import math
from typing import Any

import pytest
import torch

from fullstride.meanflow.objective.alpha_flow import AlphaFlow
from fullstride.meanflow.objective.loss import MeanFlowLoss, interpolate
from tests.meanflow.objective.test_derivative import random_unet
from tests.meanflow.objective.test_loss import data

ETA = 0.01
LAWS: dict[str, Any] = {"flow_until": 0.2, "exact_from": 0.6, "least_alpha": ETA}


def test_the_schedule_is_flow_matching_then_a_sigmoid_then_exact():
    loss = AlphaFlow(**LAWS)
    assert [getattr(loss.form_at(p), "form", None) for p in (0.0, 0.19, 0.2, 0.59, 0.6, 1.0)] == [
        "flow", "flow", "discrete", "discrete", "exact", "exact",
    ]  # fmt: skip
    assert loss.form_at(0.1) is loss
    assert [loss.form_at(p).scheduled for p in (0.0, 0.3, 0.9)] == [False, True, False]
    alpha = loss.alpha(torch.tensor([0.2, 0.4, 0.6, 0.3], dtype=torch.float64))
    quarter = 1 / (1 + math.sqrt(ETA / (1 - ETA)))
    torch.testing.assert_close(alpha, torch.tensor([1 - ETA, 0.5, ETA, quarter], dtype=torch.float64))


def test_the_gradient_is_that_of_the_papers_weighted_loss(seed):
    """a / (s + c) times s = ||u - u_tgt||^2 with u_tgt = a v + (1 - a) u(z - d v, r, t - d), by hand in fp64."""
    net, x, c = random_unet(seed), data(seed), 1e-2
    g = torch.Generator().manual_seed(seed)
    place = float(torch.rand((), generator=g)) * 0.4 + 0.2
    a = float(AlphaFlow(**LAWS).alpha(torch.tensor([place], dtype=torch.float64)))
    ours = AlphaFlow(ratio=1.0, weighting_power=1.0, weighting_eps=c / a**2, **LAWS).form_at(place)
    e, t, r = ours.draw(x, g)
    progress = torch.full((len(x),), place, dtype=x.dtype)
    got, metrics = ours.at(net, x, e, t, r, progress=progress)
    z, v, d = interpolate(x, e, t), e - x, (a * (t - r))[:, None, None, None]
    with torch.no_grad():
        target = a * v + (1 - a) * net(z - d * v, r, t - a * (t - r))
    squares = (net(z, r, t) - target).square().sum((1, 2, 3))
    paper = (a * squares / (squares.detach() + c)).mean()
    gradients = [torch.autograd.grad(value, list(net.parameters()), retain_graph=True) for value in (got, paper)]
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(metrics["squared_error"], squares.mean() / a**2 / 108, rtol=1e-6, atol=0)


def test_the_forms_meet_flow_matching_and_meanflow(seed):
    """At the ends the difference is of the whole interval, and of one that is nearly 0."""
    net, x = random_unet(seed), data(seed)
    made: dict[str, Any] = {"ratio": 0.5, "weighting_power": 0.75}
    loss = AlphaFlow(**made, flow_until=0.2, exact_from=0.6, least_alpha=1e-5)
    e, t, r = loss.draw(x, torch.Generator().manual_seed(seed))
    z = interpolate(x, e, t)
    squares = (net(z, r, t) - (e - x)).square().sum((1, 2, 3))
    flow = (squares / (squares + 1e-2) ** 0.75).mean()
    meanflow = MeanFlowLoss(**made).at(net, x, e, t, r)[0]

    def at(progress: float):
        given = torch.full((len(x),), progress, dtype=x.dtype)
        return loss.form_at(progress).at(net, x, e, t, r, progress=given)[0]

    torch.testing.assert_close(at(0.0), flow, rtol=1e-12, atol=0)
    torch.testing.assert_close(at(0.2), flow, rtol=1e-4, atol=0)
    torch.testing.assert_close(at(0.6 - 1e-12), meanflow, rtol=1e-4, atol=0)
    torch.testing.assert_close(at(0.6), meanflow, rtol=1e-12, atol=0)
    assert abs(flow - meanflow) > 1e-3 * meanflow


def test_both_ends_of_a_difference_drop_the_same_units_and_equal_times_count_as_none(seed):
    net, x = random_unet(seed), data(seed)

    class Dropping(torch.nn.Module):
        def forward(self, z, r, t):
            return torch.nn.functional.dropout(net(z, r, t), 0.5)

    loss = AlphaFlow(ratio=1.0, weighting_power=0.0, flow_until=0.0, exact_from=1.0, least_alpha=1e-7).form_at(0.999999)
    e, t, r = loss.draw(x, torch.Generator().manual_seed(seed))
    r[0] = t[0]
    value, _ = loss.at(Dropping(), x, e, t, r, progress=torch.ones(len(x), dtype=x.dtype))
    assert value.isfinite()
    assert value < 1e6  # of other units, 1e7 times the size of u, squared
    with pytest.raises(ValueError, match="without progress"):
        loss.at(net, x, e, t, r)
