import dataclasses

import pytest
import torch

from fullstride.errors import ConfigError
from fullstride.meanflow.config.overrides import compose
from fullstride.meanflow.objective.guidance import Guidance
from fullstride.meanflow.objective.improved_whole import WholeImprovedMeanFlow
from fullstride.meanflow.objective.loss import interpolate
from tests.meanflow.models.test_mit import CLASSES, random_mit

LOSS = WholeImprovedMeanFlow(ratio=0.5, weighting_power=1.0, guidance=Guidance(CLASSES, label_dropout=0.3))


def drawn(seed: int, loss=LOSS):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(6, 2, 4, 4, generator=g, dtype=torch.float64)
    e, t, r = loss.draw(x, g)
    label = torch.tensor([0, 2, CLASSES, 1, 3, CLASSES])
    return x, e, t, r, label, loss.draw_inputs(x, t, r, g)


@pytest.mark.parametrize("split", ["static", "shared"])
def test_the_loss_is_the_papers_formula(split, seed):
    """Algorithms 1 and 2, by hand in fp64: one pass for each velocity, and central differences."""
    net = random_mit(seed)
    x, e, t, r, label, given = drawn(seed)
    loss = dataclasses.replace(LOSS, split=split)
    got, metrics = loss.at(net, x, e, t, r, label, conditions=given)
    z, v, w = interpolate(x, e, t), e - x, given["omega"]
    wide = {"start": torch.zeros_like(t), "end": torch.ones_like(t)}
    inside = (t >= given["start"]) & (t <= given["end"]) & (label != CLASSES)
    w_in, none = torch.where(inside, w, 1.0), torch.full_like(label, CLASSES)
    with torch.no_grad():
        named = net(z, t, t, label, w, **wide, both=True)[:, 2:]
        free = net(z, t, t, none, torch.ones_like(w), **wide, both=True)[:, 2:]
        along = net(z, t, t, label, w_in, **wide, both=True)[:, 2:]
        guided = v + (1 - 1 / w_in)[:, None, None, None] * (named - free)
        h, inputs = 1e-5, {"label": label, **given}
        ends = [net(z + s * along, r, t + s, **inputs) for s in (h, -h, 2 * h, -2 * h)]
        dudt = (8 * (ends[0] - ends[1]) - (ends[2] - ends[3])) / (12 * h)
    u, head = net(z, r, t, **inputs, both=True).chunk(2, 1)
    squares = [
        (u + (t - r)[:, None, None, None] * dudt - guided).square().sum((1, 2, 3)),
        (head - guided).square().sum((1, 2, 3)),
    ]
    expected = torch.stack([(s / (s.detach() + 1e-2)).mean() for s in squares]).sum()
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(metrics["squared_error"], squares[0].mean() / 32, rtol=1e-6, atol=0)
    gradients = [torch.autograd.grad(value, list(net.parameters())) for value in (got, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-7)


def test_without_classes_there_is_a_head_and_no_guidance(seed):
    net = random_mit(seed, num_classes=0)
    loss = dataclasses.replace(LOSS, guidance=None)
    x, *_, given = drawn(seed, loss)
    assert given == {}
    value, _ = loss(net, x, generator=torch.Generator().manual_seed(seed))
    value.backward()
    assert all(p.grad is not None for p in net.parameters())


def test_scales_and_intervals_follow_their_laws(seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.zeros(4000, 1)
    t = torch.rand(4000, generator=g)
    r = torch.where(torch.arange(4000) < 2000, t / 2, t)
    place = torch.rand(4000, generator=g, dtype=torch.float64)
    for power in (0.0, 1.0, 2.0):
        loss = dataclasses.replace(LOSS, largest_scale=8.0, scale_power=power)
        w = loss.scale_at(place)
        # The distribution's integral of w^-power over [1, w], divided by that over [1, 8].
        area = torch.log(w) / torch.tensor(8.0).log() if power == 1 else (w ** (1 - power) - 1) / (8 ** (1 - power) - 1)
        torch.testing.assert_close(area, place, rtol=1e-6, atol=1e-9)
    given = LOSS.draw_inputs(x, t, r, g)
    assert not given["start"][2000:].any()
    assert (given["end"][2000:] == 1).all()
    assert (given["start"][:2000] <= 0.5).all()
    assert (given["end"][:2000] >= 0.5).all()
    assert given["start"][:2000].std() > 0.1
    assert 1 <= given["omega"].min() < 1.1
    assert 7 < given["omega"].max() <= 8


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["loss=imf_whole"], "a head for v"),
        (["model=mit_tiny"], "loss=imf_whole, which trains the network's head for v"),
        (["loss=imf_whole", "model=mit_tiny", "model.class_conditional=true"], "label_dropout above 0"),
        (["loss=imf_whole", "model=mit_tiny", "loss.jvp_backend=two_pass"], "one pass"),
        (["loss=imf_whole", "model=mit_tiny", "loss.guidance_end=0.5"], "largest_scale bounds"),
    ],
)
def test_settings_that_do_not_fit_are_refused(overrides, reason):
    with pytest.raises(ConfigError, match=reason):
        compose(overrides)
