import pytest
import torch
from torch import nn

from fullstride.meanflow.ema import Ema


@pytest.mark.parametrize("period", [1, 3])
def test_follows_the_recurrence(period, seed):
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    ema = Ema(model, decay=0.8, period=period)
    expected, updates = model.weight.detach().clone().double(), 0
    for step in range(1, 20):
        with torch.no_grad():
            model.weight.add_(torch.randn(2, 3))
        ema.update(step)
        if step % period == 0:
            decay = min(0.8, (1 + updates) / (10 + updates))
            expected = decay * expected + (1 - decay) * model.weight.detach().double()
            updates += 1
    assert ema.updates == updates
    torch.testing.assert_close(ema.model.weight.detach().double(), expected, rtol=1e-5, atol=1e-5)


def test_the_average_is_its_own_copy_without_gradients():
    model = nn.BatchNorm1d(2)
    ema = Ema(model, decay=0.5)
    assert not ema.model.training
    assert not any(p.requires_grad for p in ema.model.parameters())
    model(torch.randn(8, 2) + 5)
    assert ema.model.running_mean is not None
    assert ema.model.running_mean.abs().max() == 0
    ema.update(1)
    torch.testing.assert_close(ema.model.running_mean, model.running_mean, rtol=0, atol=0)
