import pytest
import torch
from torch import nn

from fullstride.step.torch import Averages


def walk(model: nn.Module, ema: Averages, seed: int, steps: int) -> list[torch.Tensor]:
    """The weights after each of some random steps, which the averages follow."""
    generator, weights = torch.Generator().manual_seed(seed), []
    for step in range(1, steps + 1):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn(p.shape, generator=generator))
        ema.update(step)
        weights.append(next(model.parameters()).detach().double().clone())
    return weights


@pytest.mark.parametrize("period", [1, 3])
def test_each_average_follows_its_recurrence(period, seed):
    model = nn.Linear(3, 2)
    ema = Averages(model, [0.8, 0.5], period, warmup=False)
    start = model.weight.detach().double().clone()
    weights = walk(model, ema, seed, 20)
    for decay, average in ema.models.items():
        expected = start
        for weight in weights[period - 1 :: period]:
            expected = decay**period * expected + (1 - decay**period) * weight
        torch.testing.assert_close(average.weight.detach().double(), expected, rtol=1e-5, atol=1e-5)
    assert ema.model is ema.models[0.8]


def test_warming_up_lets_the_initial_weights_fade(seed):
    model = nn.Linear(3, 2)
    ema = Averages(model, [0.9])
    expected = model.weight.detach().double().clone()
    for step, weight in enumerate(walk(model, ema, seed, 30)):
        kept = min(0.9, (1 + step) / (10 + step))
        expected = kept * expected + (1 - kept) * weight
    torch.testing.assert_close(ema.model.weight.detach().double(), expected, rtol=1e-5, atol=1e-5)


def test_the_period_changes_the_cost_and_not_the_pace():
    """Weights that jump once: both averages are as far from them after as many steps."""
    gaps = []
    for period in (1, 4):
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        ema = Averages(model, [0.95], period, warmup=False)
        nn.init.ones_(model.weight)
        for step in range(1, 41):
            ema.update(step)
        gaps.append(1 - ema.model.weight.item())
    assert gaps[0] == pytest.approx(gaps[1], rel=1e-4)
    assert gaps[0] == pytest.approx(0.95**40, rel=1e-4)


def test_the_average_is_its_own_copy_without_gradients():
    model = nn.BatchNorm1d(2)
    ema = Averages(model, [0.5])
    assert not ema.model.training
    assert not any(p.requires_grad for p in ema.model.parameters())
    model(torch.randn(8, 2) + 5)
    assert ema.model.running_mean is not None
    assert ema.model.running_mean.abs().max() == 0
    ema.update(1)
    torch.testing.assert_close(ema.model.running_mean, model.running_mean, rtol=0, atol=0)
