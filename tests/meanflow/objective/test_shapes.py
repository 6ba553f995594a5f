"""Losses, guidance and samplers of any rank, against sums sample by sample."""

import math

import pytest
import torch
from torch import Tensor, nn

from fullstride.meanflow.objective.derivative import JVP_BACKENDS
from fullstride.meanflow.objective.guidance import Guidance
from fullstride.meanflow.objective.improved import ImprovedMeanFlow
from fullstride.meanflow.objective.loss import MeanFlowLoss
from fullstride.meanflow.objective.weighting import adaptive_weight
from fullstride.meanflow.sampling.samplers import SAMPLERS, sample

# Tables, numbers, sounds, pictures, films; some with as many samples as channels or rows, which would broadcast.
SHAPES = [(5, 4), (4, 4), (6,), (5, 3, 7), (3, 3, 3), (4, 4, 4, 4), (3, 3, 2, 8, 8), (2, 2, 2, 2, 2, 2)]
CLASSES = 3


class Wave(nn.Module):
    """u = a sin(z) (1 + t^2) + b r + c[label], of samples of any rank."""

    def __init__(self, seed: int):
        super().__init__()
        a, b = torch.randn(2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        self.a, self.b = nn.Parameter(a), nn.Parameter(b)
        self.c = nn.Parameter(torch.arange(CLASSES + 1.0, dtype=torch.float64) / 3)

    def forward(self, z: Tensor, r: Tensor, t: Tensor, label: Tensor | None = None) -> Tensor:
        for _ in range(z.ndim - 1):
            r, t = r[..., None], t[..., None]
        u = z.sin() * (self.a * (t * t + 1)) + self.b * r
        return u if label is None else u + self.c[label].view(-1, *[1] * (z.ndim - 1))


class OneByOne(Wave):
    """A network without labels at all."""

    def forward(self, z: Tensor, r: Tensor, t: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(z, r, t)


def sample_by_sample(net: Wave, x: Tensor, e: Tensor, t: Tensor, r: Tensor, power: float) -> Tensor:
    """The loss of each sample by itself, as one row of numbers."""
    losses = []
    for i in range(len(x)):
        v, ti, ri = (e[i] - x[i]).reshape(1, -1), t[i : i + 1], r[i : i + 1]
        z = ((1 - ti) * x[i].reshape(1, -1) + ti * e[i].reshape(1, -1)).detach()
        u, dudt = torch.func.jvp(  # pyright: ignore[reportAssignmentType]
            lambda z, t, ri=ri: net(z, ri, t), (z, ti), (v, torch.ones_like(ti))
        )
        error = (u - (v - (ti - ri) * dudt).detach()).square().sum()
        losses.append(error * adaptive_weight(error[None], power)[0])
    return torch.stack(losses).mean()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("split", ["static", "shared", "full"])
@pytest.mark.parametrize("ratio", [0.0, 0.5])
def test_the_loss_of_any_rank_is_that_of_its_samples_one_by_one(shape, split, ratio, seed):
    net, generator = Wave(seed), torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    loss = MeanFlowLoss(ratio=ratio, weighting_power=0.5, weighting_eps=1e-3, split=split)
    e, t, r = loss.draw(x, generator)
    value, metrics = loss.at(net, x, e, t, r)
    expected = sample_by_sample(net, x, e, t, r, 0.5)
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=0)
    found, wanted = (torch.autograd.grad(y, [net.a, net.b]) for y in (value, expected))
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
    assert metrics["squared_error"] > 0


@pytest.mark.parametrize("backend", JVP_BACKENDS)
@pytest.mark.parametrize("objective", [MeanFlowLoss, ImprovedMeanFlow])
def test_every_backend_takes_any_rank(backend, objective):
    net, x = Wave(1), torch.randn(3, 3, 5, dtype=torch.float64)
    values = [
        objective(ratio=0.7, weighting="huber", backend=name)(net, x, generator=torch.Generator().manual_seed(2))[0]
        for name in ("func", backend)
    ]
    torch.testing.assert_close(*values, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("omega", "kappa"), [(2.0, 0.0), (0.5, 0.4)])
def test_guidance_of_any_rank_is_that_of_its_samples_one_by_one(shape, omega, kappa):
    net, (z, v) = Wave(3), torch.randn(2, *shape, dtype=torch.float64)
    t, label = torch.rand(len(z), dtype=torch.float64), torch.arange(len(z)) % (CLASSES + 1)
    found = Guidance(CLASSES, omega, kappa, start=0.3, end=0.8).velocity(net, z, t, v, {"label": label})
    for i in range(len(z)):
        own = label[i] != CLASSES and 0.3 <= t[i] <= 0.8
        with_class, without = (net(z[i : i + 1], t[i : i + 1], t[i : i + 1], y[None])[0] for y in (label[i], *NONE))
        expected = omega * v[i] + kappa * with_class + (1 - omega - kappa) * without if own else v[i]
        torch.testing.assert_close(found[i], expected, rtol=1e-12, atol=1e-12)


NONE = (torch.tensor(CLASSES),)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_samplers_of_any_rank_solve_each_element(shape, sampler):
    """Every element's path through an elementwise field is its own, whatever shape they lie in."""
    net, noise = Wave(4), torch.randn(shape, dtype=torch.float64)
    steps = None if sampler == "dopri5" else 6
    with torch.no_grad():
        found = SAMPLERS[sampler](net, noise, steps=steps).images
        rows = torch.cat([SAMPLERS[sampler](net, row.reshape(1, -1), steps=steps).images for row in noise])
    torch.testing.assert_close(found, rows.reshape(shape), rtol=1e-4, atol=1e-4)
    assert found.std() > 0
    assert not torch.allclose(found, noise)


def test_a_network_without_labels_trains_and_is_sampled():
    net, shape = OneByOne(5).float(), (2, 3)
    MeanFlowLoss(ratio=0.5)(net, torch.randn(4, *shape))[0].backward()
    assert net.a.grad is not None
    made = [
        sample(net, sampler=name, steps=n, num=5, shape=shape, seed=1) for name, n in (("meanflow", 2), ("heun", 2))
    ]
    assert all(one.images.shape == (5, *shape) for one in made)
    assert str(made[0]) == "5 samples of 2 x 3, 2 evaluations of the network each"


def test_what_cannot_be_is_refused_by_its_shape_in_a_line(forked):
    """(b, 1, h, w) less (b, c, h, w), or times (b, 1) beside (b, d), is no error to PyTorch, and another loss."""
    (done,) = forked(["tests.meanflow.objective.refused_shapes"])
    assert done.returncode == 0, done.stderr[-2000:]
    said = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert len(said) > 25
    for name, message in said.items():
        assert "expected" in message, f"{name}: {message}"
        assert any(word in message for word in ("(4, 1, 5, 5)", "tuple", "(0, 3, 4, 4)", "(4, 0)", "()", "torch.")) or (
            "entries" in message or "each of" in message
        ), f"{name}: {message}"


@pytest.mark.parametrize(
    "given",
    [
        {"label_dropout": math.nan},
        {"label_dropout": 1.5},
        {"omega": math.inf},
        {"kappa": 1.0},
        {"kappa": math.nan},
        {"start": 0.7, "end": 0.6},
        {"start": math.nan},
        {"end": 1.1},
    ],
    ids=str,
)
def test_guidance_that_cannot_be_is_refused_by_name(given):
    with pytest.raises(ValueError, match=rf"{next(iter(given))}( is |=).*expected"):
        Guidance(CLASSES, **given)


def test_guidance_without_classes_is_refused():
    with pytest.raises(ValueError, match="num_classes is 0"):
        Guidance(0)
