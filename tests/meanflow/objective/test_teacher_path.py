import dataclasses

import pytest
import torch

from fullstride.errors import ConfigError
from fullstride.meanflow.config.overrides import compose
from fullstride.meanflow.objective.teacher import Teacher
from fullstride.meanflow.objective.teacher_path import TeacherPath
from tests.meanflow.fields import GaussianField
from tests.meanflow.objective.test_derivative import random_unet
from tests.meanflow.objective.test_loss import data


def test_value_and_gradient_are_the_formulas(seed):
    """Two steps of Heun's method by hand; sample k is on the path of noise k % 3."""
    net, other, x = random_unet(seed), random_unet(seed + 10).eval(), data(seed)
    loss = TeacherPath(ratio=0.0, weighting_power=0.0, teacher=Teacher(other), path_steps=2, path_pairs=3)
    e, t, r = loss.draw(x, torch.Generator().manual_seed(seed))
    got, metrics = loss.at(net, x, e, t, r)

    def heun(z, t):
        t = torch.full((3,), t, dtype=z.dtype)
        ahead = other(z, t, t)
        return z - (ahead + other(z - ahead / 2, t - 0.5, t - 0.5)) / 4

    with torch.no_grad():
        middle = heun(e[:3], 1.0)
        points = {1.0: e[:3], 0.5: middle, 0.0: heun(middle, 0.5)}
    squares = []
    for k in range(9):
        later, earlier = points[float(t[k])][k % 3], points[float(r[k])][k % 3]
        u = net(later[None], r[k : k + 1], t[k : k + 1])[0]
        squares.append((u - (later - earlier) / (t[k] - r[k])).square().sum())
    expected = torch.stack(squares).mean()
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=0)
    torch.testing.assert_close(metrics["squared_error"], expected.detach() / 108, rtol=1e-9, atol=0)
    gradients = [torch.autograd.grad(value, list(net.parameters())) for value in (got, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-7, atol=1e-9)


def test_the_average_velocity_of_the_teachers_flow_has_no_error_but_the_solvers(seed):
    """Heun's error falls with the square of the steps, to a closed form."""
    field, x = GaussianField(mean=0.4, std=0.7), data(seed)
    loss = TeacherPath(ratio=0.0, weighting_power=0.0, teacher=Teacher(field), path_steps=8, path_pairs=2)
    finer = dataclasses.replace(loss, path_steps=32)
    coarse, fine = (one.at(field, x, *one.draw(x, torch.Generator().manual_seed(seed)))[0] for one in (loss, finer))
    assert fine < coarse / 50
    assert coarse < 1


def test_the_times_are_two_different_ones_of_the_grid_each_pair_alike(seed):
    loss = TeacherPath(ratio=0.0, teacher=Teacher(GaussianField()), path_steps=3)
    e, t, r = loss.draw(torch.zeros(6000, 1), torch.Generator().manual_seed(seed))
    pairs, counts = torch.stack([t * 3, r * 3], 1).round().long().unique(dim=0, return_counts=True)
    assert pairs.tolist() == [[1, 0], [2, 0], [2, 1], [3, 0], [3, 1], [3, 2]]
    assert (counts - 1000).abs().max() < 150
    assert e.std() > 0.9
    with pytest.raises(ValueError, match="without a teacher"):
        dataclasses.replace(loss, teacher=None).at(GaussianField(), data(0), data(1), t[:9], r[:9])


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("loss.path_steps=4", "loss.teacher=RUN, whose paths it learns"),
        ("loss.time_law=uniform", "all that is read"),
        ("loss.meanflow_ratio=0.5", "0; leave it out"),
        ("loss.split=static", "all that is read"),
    ],
)
def test_what_it_does_not_read_is_refused(override, reason):
    teacher = [] if "path" in override else ["loss.teacher=x"]
    with pytest.raises(ConfigError, match=reason):
        compose(["loss=cmt", override, *teacher])
