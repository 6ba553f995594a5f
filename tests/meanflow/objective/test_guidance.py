import pytest
import torch
from torch import Tensor, nn

from fullstride.meanflow.objective.guidance import Guidance
from fullstride.meanflow.objective.loss import SPLITS, MeanFlowLoss
from tests.meanflow.fields import batch_of_points
from tests.meanflow.objective.test_derivative import random_unet

CLASSES = 4


class ByClass(nn.Module):
    """u = a[c] z: every class its own slope, so that who was asked for shows."""

    def __init__(self):
        super().__init__()
        self.slope = nn.Parameter(torch.tensor([2.0, 3.0, 5.0, 7.0, 11.0], dtype=torch.float64))
        self.dropout = nn.Dropout(0.5)
        self.calls = 0

    def forward(self, z: Tensor, r: Tensor, t: Tensor, label: Tensor) -> Tensor:
        assert torch.equal(r, t)
        self.calls += 1
        return self.dropout(self.slope[label][:, None, None, None] * z)


@pytest.mark.parametrize(("omega", "kappa"), [(3.0, 0.0), (1.0, 0.5), (0.2, 0.92)])
def test_the_guided_velocity_is_the_papers(omega, kappa, seed):
    z, v, t, _ = batch_of_points(seed)
    label = torch.arange(len(z)) % (CLASSES + 1)
    model = ByClass()
    guidance = Guidance(CLASSES, omega, kappa, start=0.2, end=0.7)
    got = guidance.velocity(model, z, t, v, {"label": label})
    for i in range(len(z)):
        own, none = model.slope[label[i]] * z[i], 11.0 * z[i]
        guided = omega * v[i] + kappa * own + (1 - omega - kappa) * none
        inside = 0.2 <= t[i] <= 0.7 and label[i] != CLASSES
        torch.testing.assert_close(got[i], guided if inside else v[i])
    assert not got.requires_grad
    assert model.training
    assert model.calls == 1


def test_no_guidance_calls_no_network(seed):
    z, v, t, _ = batch_of_points(seed)
    model = ByClass()
    assert Guidance(CLASSES).velocity(model, z, t, v, {"label": torch.zeros(len(z), dtype=torch.long)}) is v
    assert model.calls == 0


def test_guidance_of_a_field_that_obeys_it_is_its_fixed_point(seed):
    """If u(c) and u(none) are a guided field's, v_g of the conditional velocity has the effective scale w/(1-k)."""
    z, v, t, _ = batch_of_points(seed)
    label = torch.zeros(len(z), dtype=torch.long)
    omega, kappa = 0.5, 0.75
    scale = omega / (1 - kappa)
    none = 11.0 * z
    guided = scale * v + (1 - scale) * none

    def model(z: Tensor, r: Tensor, t: Tensor, label: Tensor) -> Tensor:
        return torch.where(
            (label == CLASSES)[:, None, None, None], 11.0 * z, guided.repeat(len(z) // len(guided), 1, 1, 1)
        )

    got = Guidance(CLASSES, omega, kappa).velocity(model, z, t, v, {"label": label})
    torch.testing.assert_close(got, guided)


def test_labels_are_dropped_with_their_probability_at_the_end_of_the_batch(seed):
    label = torch.arange(64) % CLASSES
    generator = torch.Generator().manual_seed(seed)
    guidance = Guidance(CLASSES, label_dropout=0.25)
    draws = torch.stack([guidance.drop(label, generator) for _ in range(200)])
    dropped = draws == CLASSES
    assert abs(dropped.double().mean() - 0.25) < 0.02
    assert dropped.sum(1).unique().numel() > 5
    assert bool((dropped[:, 1:] >= dropped[:, :-1]).all())
    assert torch.equal(torch.where(dropped, label, draws), label.expand(200, -1))


@pytest.mark.parametrize("split", SPLITS)
def test_labels_are_dropped_where_r_is_t(split, seed):
    """About 16 of 64 samples have r = t and about 3 lose their labels: these are all among those."""
    loss = MeanFlowLoss(0.75, split=split, guidance=Guidance(CLASSES, label_dropout=0.05))
    generator, curved, count = torch.Generator().manual_seed(seed), [], 0
    for _ in range(200):
        _, t, r = loss.draw(torch.zeros(64, 1, 1, 1), generator)
        dropped = loss.drop_labels(torch.zeros(64, dtype=torch.long), generator) == CLASSES
        count += int(dropped.sum())
        curved.append(int((r < t).sum()))
        assert not (dropped & (r < t)).any()
    assert abs(count / (200 * 64) - 0.05) < 0.01
    assert abs(sum(curved) / (200 * 64) - 0.75) < 0.02
    assert (len(set(curved)) > 5) == (split == "bernoulli")


def test_the_loss_regresses_on_the_guided_velocity(seed):
    net = random_unet(seed, num_classes=CLASSES)
    x = torch.randn(6, 3, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    label = torch.tensor([0, 1, 2, 3, 4, 1])
    guidance = Guidance(CLASSES, omega=2.0, kappa=0.25)
    loss = MeanFlowLoss(ratio=0.0, weighting_power=0.0, guidance=guidance)
    e, t, r = loss.draw(x, torch.Generator().manual_seed(seed))
    value, _ = loss.at(net, x, e, t, r, label)
    time = t[:, None, None, None]
    z, v = (1 - time) * x + time * e, e - x
    with torch.no_grad():
        u, none = net(z, t, t, label), net(z, t, t)
        target = torch.where((label == CLASSES)[:, None, None, None], v, 2 * v + 0.25 * u - 1.25 * none)
        expected = (u - target).square().sum((1, 2, 3)).mean()
    torch.testing.assert_close(value, expected, rtol=1e-9, atol=0)


def test_the_guided_tangent_enters_the_derivative(seed):
    """ratio 1: the target is v_g - (t - r) du/dt with du/dt taken along v_g, not along e - x."""
    from tests.meanflow.objective.test_derivative import central_difference

    net = random_unet(seed, num_classes=CLASSES)
    x = torch.randn(5, 3, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    label = torch.tensor([0, 1, 2, 3, 1])
    loss = MeanFlowLoss(ratio=1.0, weighting_power=0.0, guidance=Guidance(CLASSES, omega=1.5))
    e, t, r = loss.draw(x, torch.Generator().manual_seed(seed))
    value, _ = loss.at(net, x, e, t, r, label)
    time = t[:, None, None, None]
    z, v = (1 - time) * x + time * e, e - x
    with torch.no_grad():
        guided = 1.5 * v - 0.5 * net(z, t, t)
        dudt = central_difference(net, z, r, t, guided, label)
        target = guided - (t - r)[:, None, None, None] * dudt
        expected = (net(z, r, t, label) - target).square().sum((1, 2, 3)).mean()
    torch.testing.assert_close(value, expected, rtol=1e-6, atol=0)


def test_calling_the_loss_drops_labels_and_is_reproducible():
    net = random_unet(0, num_classes=CLASSES)
    x, label = torch.randn(8, 3, 6, 6, dtype=torch.float64), torch.arange(8) % CLASSES
    loss = MeanFlowLoss(guidance=Guidance(CLASSES, label_dropout=1.0))
    a, b = (loss(net, x, label, generator=torch.Generator().manual_seed(3))[0] for _ in range(2))
    without = MeanFlowLoss()(net, x, generator=torch.Generator().manual_seed(3))[0]
    assert a == b == without


def test_guidance_without_labels_is_refused(seed):
    z, v, t, _ = batch_of_points(seed)
    with pytest.raises(ValueError, match="the batch has no labels"):
        Guidance(CLASSES, omega=2.0).velocity(ByClass(), z, t, v, {})
